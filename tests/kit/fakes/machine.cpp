#include "machine.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace fake {
Machine &machine() {
    static Machine *made = new Machine;  // lives as long as the process: its thread does, too
    return *made;
}

Machine::Machine() {
    worker_ = std::thread([this] { run(); });  // when everything that it looks at is there
}

Machine::~Machine() = default;

void Machine::reset(unsigned seed, bool late_reads, int max_delay_us) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] {
        return std::none_of(streams_.begin(), streams_.end(), [](auto &s) { return s->is_running; });
    });
    streams_.clear();
    legacy_.clear();
    events_.clear();
    for (Range &range : ranges_) drop_memory(range);
    ranges_.clear();
    cuts_.clear();
    claims_.clear();
    violations_.clear();
    counts_.clear();
    failing_calls_.clear();
    num_batches_ = failing_batch_ = num_copies_ = failing_copy_ = 0;
    late_error_ = lost_code_ = 0;
    queued_bytes_ = 0;
    held_ = false;
    random_.seed(seed);
    late_reads_ = late_reads;
    max_delay_us_ = max_delay_us;
}

// -- what tests say --------------------------------------------------------------------------------

void Machine::hold(bool on) {
    std::lock_guard lock(mutex_);
    held_ = on;
    changed_.notify_all();
}

void Machine::fail_call(const std::string &name, int nth, int code) {
    std::lock_guard lock(mutex_);
    failing_calls_[name] = {counts_[name] + nth, code};
}

void Machine::fail_entry(int nth_batch, std::size_t entry, int code) {
    std::lock_guard lock(mutex_);
    failing_batch_ = num_batches_ + nth_batch;
    failing_entry_ = entry;
    failing_entry_code_ = code;
}

void Machine::fail_late(int nth_copy, int code) {
    std::lock_guard lock(mutex_);
    failing_copy_ = num_copies_ + nth_copy;
    failing_copy_code_ = code;
}

void Machine::lose_device(int code) {
    std::lock_guard lock(mutex_);
    lost_code_ = late_error_ = code;
    for (auto &stream : streams_) stream->ops.clear();
    for (auto &event : events_) event->completed = event->recorded;
    changed_.notify_all();
}

std::vector<std::string> Machine::violations() {
    std::lock_guard lock(mutex_);
    return violations_;
}

std::vector<std::string> Machine::leaks() {
    std::lock_guard lock(mutex_);
    std::vector<std::string> found;
    for (auto &stream : streams_)
        if (!stream->is_compute) found.push_back("a stream");
    for (auto &event : events_)
        if (!event->is_destroyed) found.push_back("an event");
    for (Range &range : ranges_)
        if (range.is_owned || range.is_registered)
            found.push_back((range.is_registered ? "a registration of " : "an allocation of ") +
                            std::to_string(range.size) + " bytes");
    return found;
}

std::map<std::string, long> Machine::counts() {
    std::lock_guard lock(mutex_);
    return counts_;
}

long Machine::num_pending() {
    std::lock_guard lock(mutex_);
    long count = 0;
    for (auto &stream : streams_)
        for (const Op &op : stream->ops)
            count += op.what == Op::What::copies || op.what == Op::What::fill;
    return count;
}

int Machine::enter(const char *name) {
    std::lock_guard lock(mutex_);
    const long count = ++counts_[name];
    if (lost_code_) return lost_code_;
    auto failing = failing_calls_.find(name);
    if (failing != failing_calls_.end() && failing->second.first == count) {
        const int code = failing->second.second;
        failing_calls_.erase(failing);
        return code;
    }
    return 0;
}

void Machine::note_violation(const std::string &what) {
    std::lock_guard lock(mutex_);
    violations_.push_back(what);
}

void Machine::note_peak(std::size_t bytes) {
    auto &peak = counts_["peak_queued_bytes"];
    peak = std::max(peak, static_cast<long>(bytes));
}

// -- streams and events ----------------------------------------------------------------------------

Stream *Machine::make_stream(int device, bool is_compute) {
    std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->device = device;
    streams_.back()->is_compute = is_compute;
    return streams_.back().get();
}

Stream *Machine::legacy_stream(int device) {
    {
        std::lock_guard lock(mutex_);
        auto found = legacy_.find(device);
        if (found != legacy_.end()) return found->second;
    }
    Stream *made = make_stream(device, true);
    std::lock_guard lock(mutex_);
    return legacy_[device] = made;
}

bool Machine::is_stream(const void *stream) {
    std::lock_guard lock(mutex_);
    return std::any_of(streams_.begin(), streams_.end(),
                       [&](auto &each) { return each.get() == stream; });
}

bool Machine::destroy_stream(Stream *stream) {
    synchronize(stream);
    std::lock_guard lock(mutex_);
    streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                  [&](auto &each) { return each.get() == stream; }),
                   streams_.end());
    return true;
}

Event *Machine::make_event(int device) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::make_unique<Event>());
    events_.back()->device = device;
    return events_.back().get();
}

bool Machine::is_event(const void *event) {
    std::lock_guard lock(mutex_);
    return std::any_of(events_.begin(), events_.end(), [&](auto &each) {
        return each.get() == event && !each->is_destroyed;
    });
}

bool Machine::destroy_event(Event *event) {
    std::lock_guard lock(mutex_);
    event->is_destroyed = true;  // operations on their way may still name it
    return true;
}

void Machine::enqueue(Stream *stream, Op op) {
    op.seq = ++stream->last_seq;
    stream->ops.push_back(std::move(op));
    changed_.notify_all();
}

void Machine::record(Event *event, Stream *stream) {
    std::lock_guard lock(mutex_);
    Op op;
    op.what = Op::What::record;
    op.event = event;
    op.version = ++event->recorded;
    event->clock = stream->clock;
    event->clock[stream] = stream->last_seq + 1;
    enqueue(stream, std::move(op));
}

void Machine::wait(Stream *stream, Event *event) {
    std::lock_guard lock(mutex_);
    if (event->recorded == 0) return;  // never recorded: nothing to wait for
    for (auto &[other, seq] : event->clock) {
        auto &known = stream->clock[other];
        known = std::max(known, seq);
    }
    Op op;
    op.what = Op::What::wait;
    op.event = event;
    op.version = event->recorded;
    enqueue(stream, std::move(op));
}

bool Machine::is_complete(Event *event) {
    std::lock_guard lock(mutex_);
    return event->completed >= event->recorded;
}

bool Machine::is_complete(Stream *stream) {
    std::lock_guard lock(mutex_);
    return stream->ops.empty();
}

bool Machine::synchronize(Event *event, int timeout_ms) {
    std::unique_lock lock(mutex_);
    const std::uint64_t version = event->recorded;
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return event->completed >= version; });
}

bool Machine::synchronize(Stream *stream, int timeout_ms) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return stream->ops.empty(); });
}

int Machine::late_error() {
    std::lock_guard lock(mutex_);
    return late_error_;
}

// -- copies ----------------------------------------------------------------------------------------

// What a batch may not do, and what it may not do beside the work of other streams.
void Machine::judge(Stream *stream, const std::vector<Copy> &copies) {
    std::vector<Copy> sorted = copies;
    std::sort(sorted.begin(), sorted.end(), [](auto &a, auto &b) { return a.dst < b.dst; });
    for (std::size_t at = 1; at < sorted.size(); ++at)
        if (sorted[at - 1].dst + sorted[at - 1].size > sorted[at].dst)
            violations_.push_back("two copies of a batch write the same bytes");
    for (const Claim &claim : claims_)
        for (const Copy &copy : copies)
            if (claim.conflicts(copy)) {
                violations_.push_back("a stream touches bytes that storage moves");
                return;
            }
    for (auto &other : streams_) {
        if (other.get() == stream) continue;
        for (Op &op : other->ops) {
            if (op.seq <= stream->clock[other.get()]) continue;  // known to be done before
            for (const Copy &theirs : op.copies) {
                auto first = std::partition_point(sorted.begin(), sorted.end(), [&](auto &c) {
                    return c.dst + c.size <= theirs.dst;
                });
                bool races = first != sorted.end() &&
                             overlap(first->dst, first->size, theirs.dst, theirs.size);
                for (const Copy &ours : copies)
                    races = races || overlap(ours.dst, ours.size, theirs.src, theirs.size) ||
                            overlap(ours.src, ours.size, theirs.dst, theirs.size);
                if (races) {
                    violations_.push_back("two streams touch the same bytes, in no order");
                    return;
                }
            }
        }
    }
}

void Machine::submit(Stream *stream, std::vector<Copy> copies) {
    submit_late(stream, std::move(copies), nullptr, nullptr, nullptr);
}

void Machine::submit_late(Stream *stream, std::vector<Copy> copies, const std::uint64_t *dsts,
                          const std::uint64_t *srcs, const std::uint64_t *sizes) {
    std::lock_guard lock(mutex_);
    judge(stream, copies);
    for (Copy &copy : copies) queued_bytes_ += copy.size;
    note_peak(queued_bytes_);
    counts_["copies"] += static_cast<long>(copies.size());
    Op op;
    op.what = Op::What::copies;
    op.count = copies.size();
    op.copies = std::move(copies);
    op.dsts = dsts;
    op.srcs = srcs;
    op.sizes = sizes;
    enqueue(stream, std::move(op));
}

void Machine::submit_fill(Stream *stream, Address at, std::size_t size, int value) {
    std::lock_guard lock(mutex_);
    Op op;
    op.what = Op::What::fill;
    op.copies = {{at, at, size}};
    judge(stream, op.copies);
    op.value = value;
    enqueue(stream, std::move(op));
}

bool Machine::copy_now(Stream *stream, const std::vector<Copy> &copies) {
    if (!synchronize(stream)) return false;
    std::lock_guard lock(mutex_);
    counts_["synchronous_copies"] += static_cast<long>(copies.size());
    do_copies(copies);
    return true;
}

std::pair<std::size_t, int> Machine::failing_entry(std::size_t count) {
    std::lock_guard lock(mutex_);
    if (++num_batches_ != failing_batch_) return {count, 0};
    return {std::min(failing_entry_, count), failing_entry_code_};
}

void Machine::do_copies(std::vector<Copy> copies) {
    std::shuffle(copies.begin(), copies.end(), random_);
    for (Copy &copy : copies) {
        if (++num_copies_ == failing_copy_) {
            late_error_ = failing_copy_code_;
            return;
        }
        // Pageable host memory is in no range, and is reached where it is.
        const Address dst = reach(copy.dst, copy.size), src = reach(copy.src, copy.size);
        std::memcpy(reinterpret_cast<void *>(dst ? dst : copy.dst),
                    reinterpret_cast<void *>(src ? src : copy.src), copy.size);
    }
}

void Machine::execute(Op &op) {
    if (op.what == Op::What::record) {
        op.event->completed = std::max(op.event->completed, op.version);
    } else if (op.what == Op::What::fill && !late_error_) {
        const Address at = reach(op.copies[0].dst, op.copies[0].size);
        if (at) std::memset(reinterpret_cast<void *>(at), op.value, op.copies[0].size);
    } else if (op.what == Op::What::copies && !late_error_) {
        if (op.dsts) {
            for (std::size_t at = 0; at < op.count; ++at) {
                const Copy now{op.dsts[at], op.srcs[at], op.sizes[at]}, then = op.copies[at];
                if (now.dst != then.dst || now.src != then.src || now.size != then.size) {
                    violations_.push_back("the arrays of a batch changed before it was done");
                    return;
                }
            }
        }
        do_copies(op.copies);
    }
    if (op.what == Op::What::copies)
        for (Copy &copy : op.copies) queued_bytes_ -= copy.size;
}

Stream *Machine::next_runnable() {
    if (held_) return nullptr;
    std::vector<Stream *> found;
    for (auto &stream : streams_) {
        if (stream->ops.empty() || stream->is_running) continue;
        Op &op = stream->ops.front();
        if (op.what != Op::What::wait || op.event->completed >= op.version)
            found.push_back(stream.get());
    }
    return found.empty() ? nullptr : found[random_() % found.size()];
}

void Machine::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        Stream *stream = nullptr;
        changed_.wait(lock, [&] { return (stream = next_runnable()) != nullptr; });
        if (max_delay_us_ > 0) {
            const auto delay = std::chrono::microseconds(random_() % max_delay_us_);
            stream->is_running = true;
            lock.unlock();
            std::this_thread::sleep_for(delay);
            lock.lock();
            stream->is_running = false;
            changed_.notify_all();
            if (held_ || stream->ops.empty()) continue;
        }
        execute(stream->ops.front());
        stream->ops.pop_front();
        changed_.notify_all();
    }
}

}  // namespace fake
