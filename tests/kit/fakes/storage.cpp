#include "storage.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {
namespace {

bool is_variable(const char *name, const char *value) {
    const char *found = std::getenv(name);
    return found && std::strcmp(found, value) == 0;
}

// As cuFile writes it, for those who named a file.
void log_error(const char *words) {
    const char *path = std::getenv("CUFILE_LOGFILE_PATH");
    std::FILE *log = path ? std::fopen(path, "a") : nullptr;
    if (!log) return;
    std::fprintf(log, " 26-11-2026 16:00:00:1 [pid=1 tid=1] ERROR  cufio-fake:1 %s\n", words);
    std::fclose(log);
}

// Whole pages, of which it tells `size` bytes.
ssize_t transfer(const Request &request, std::size_t size) {
    const std::size_t whole = (size + io_page - 1) / io_page * io_page;
    void *buffer = std::aligned_alloc(io_page, whole);
    ssize_t moved = -1;
    if (request.write) {
        if (machine().peek(request.at, buffer, whole))
            moved = pwrite(request.file->fd, buffer, whole, request.offset);
        else
            errno = EFAULT;
    } else {
        moved = pread(request.file->fd, buffer, whole, request.offset);
        if (moved > 0 && is_variable("KVTIER_FAKE_BYTES", "wrong"))
            static_cast<char *>(buffer)[moved - 1] ^= 1;
        if (moved > 0 && !machine().poke(request.at, buffer, static_cast<std::size_t>(moved))) {
            machine().note_violation("memory was gone when its bytes came");
            moved = -1;
            errno = EFAULT;
        }
    }
    const int left = errno;
    std::free(buffer);
    errno = left;
    return std::min(moved, static_cast<ssize_t>(size));
}

}  // namespace

Storage &storage() {
    static Storage *made = new Storage;  // lives as long as the process: its thread does, too
    return *made;
}

Storage::Storage() {
    worker_ = std::thread([this] { run(); });
}

// -- what tests say --------------------------------------------------------------------------------

void Storage::reset(unsigned seed, int max_delay_us, int percent_short, bool is_bounced) {
    std::unique_lock lock(mutex_);
    for (auto &batch : batches_) {
        num_moving_ -= static_cast<long>(batch->waiting.size() + batch->stuck.size());
        batch->waiting.clear();
        batch->stuck.clear();
    }
    held_ = false;
    changed_.notify_all();
    changed_.wait(lock, [this] { return num_moving_ == 0; });
    files_.clear();
    memory_.clear();
    batches_.clear();
    is_open_ = false;
    is_bounced_ = is_bounced;
    may_bounce_ = true;
    max_delay_us_ = max_delay_us;
    percent_short_ = percent_short;
    cancels_ = Cancel::works;
    max_pinned_kib_ = default_pinned_kib;
    pool_ = default_pool;
    num_transfers_ = failing_ = 0;
    submit_code_ = 0;
    random_.seed(seed);
}

void Storage::hold(bool on) {
    std::lock_guard lock(mutex_);
    held_ = on;
    changed_.notify_all();
}

void Storage::fail(int nth, Fault fault, int value) {
    std::lock_guard lock(mutex_);
    failing_ = num_transfers_ + nth;
    fault_ = fault;
    fault_value_ = value;
}

void Storage::cancels(Cancel how) {
    std::lock_guard lock(mutex_);
    cancels_ = how;
}

void Storage::fail_submit(int code) {
    std::lock_guard lock(mutex_);
    submit_code_ = code;
}

void Storage::limit_pinned(std::size_t kib) {
    std::lock_guard lock(mutex_);
    max_pinned_kib_ = kib;
}

long Storage::num_moving() {
    std::lock_guard lock(mutex_);
    return num_moving_;
}

long Storage::num_transfers() {
    std::lock_guard lock(mutex_);
    return num_transfers_;
}

std::vector<std::string> Storage::leaks() {
    std::lock_guard lock(mutex_);
    std::vector<std::string> found;
    if (is_open_) found.push_back("an open driver");
    found.insert(found.end(), files_.size(), "a registered file");
    found.insert(found.end(), memory_.size(), "registered memory");
    for (auto &batch : batches_)
        if (!batch->is_destroyed) found.push_back("a batch");
    return found;
}

// -- the driver ------------------------------------------------------------------------------------

int Storage::open(const char *compat) {
    if (is_variable("KVTIER_FAKE_DRIVER", "spin"))
        for (;;) usleep(1000);
    if (is_variable("KVTIER_FAKE_DRIVER", "abort")) std::abort();
    if (is_variable("KVTIER_FAKE_DRIVER", "absent")) return driver_absent;
    std::lock_guard lock(mutex_);
    if (is_open_) return driver_open;
    is_bounced_ = is_bounced_ || is_variable("KVTIER_FAKE_DRIVER", "bounced") ||
                  is_variable("KVTIER_FAKE_DRIVER", "no udev");
    if (is_bounced_ && (!may_bounce_ || (compat && is_variable(compat, "false")))) {
        log_error("the kernel module is not loaded");
        return driver_closed;
    }
    is_open_ = true;
    return file_ok;
}

int Storage::allow_bounce(bool on) {
    std::lock_guard lock(mutex_);
    if (is_open_) return driver_open;
    may_bounce_ = on;
    return file_ok;
}

int Storage::close() {
    std::lock_guard lock(mutex_);
    if (!is_open_) {
        machine().note_violation("a driver was closed that is not open");
        return driver_closed;
    }
    if (num_moving_) {
        machine().note_violation("the driver was closed while bytes moved");
        return driver_closing;
    }
    if (!files_.empty() || !memory_.empty())
        machine().note_violation("the driver was closed before what was registered was let go");
    is_open_ = false;
    return file_ok;
}

int Storage::set_pool(const std::size_t *kib, const std::size_t *counts, int num) {
    std::lock_guard lock(mutex_);
    if (is_open_) return driver_open;
    if (num != 3 || !kib || !counts || !std::is_sorted(kib, kib + num)) return wrong_value;
    pool_ = *std::min_element(counts, counts + num);
    return file_ok;
}

std::size_t Storage::max_pinned_kib() {
    std::lock_guard lock(mutex_);
    return max_pinned_kib_;
}

int Storage::set_max_pinned(std::size_t kib) {
    std::lock_guard lock(mutex_);
    if (!is_open_) return driver_closed;
    max_pinned_kib_ = kib;
    return file_ok;
}

// -- files and memory ------------------------------------------------------------------------------

int Storage::add_file(int fd, const char *compat, File **made) {
    std::lock_guard lock(mutex_);
    if (!is_open_) return driver_closed;
    const int flags = fcntl(fd, F_GETFL);
    struct stat facts;
    if (flags < 0 || fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) return wrong_value;
    if (!(flags & O_DIRECT)) return not_direct;
    for (auto &file : files_)
        if (file->fd == fd) return file_known;
    if (is_bounced_ && compat && is_variable(compat, "false")) return not_on_this_file;
    if (is_variable("KVTIER_FAKE_DRIVER", "no udev")) {
        log_error("udev property not found: ID_FS_USAGE vda");
        return file_unknown;
    }
    files_.push_back(std::make_unique<File>(File{fd}));
    *made = files_.back().get();
    return file_ok;
}

void Storage::drop_file(File *file) {
    std::lock_guard lock(mutex_);
    auto found = std::find_if(files_.begin(), files_.end(),
                              [&](auto &each) { return each.get() == file; });
    if (found == files_.end()) {
        machine().note_violation("a file was let go that is not registered");
        return;
    }
    if (num_moving_) machine().note_violation("a file was let go while bytes moved");
    if (fcntl(file->fd, F_GETFD) < 0)
        machine().note_violation("a file was closed before it was let go");
    files_.erase(found);
}

int Storage::add_memory(Address at, std::size_t size, int device) {
    std::lock_guard lock(mutex_);
    if (!is_open_) return driver_closed;
    if (size == 0) return wrong_value;
    if (machine().place(at, size, device) != Machine::Place::device) return range_error;
    std::size_t pinned = size;
    for (auto &[begin, length] : memory_) {
        if (overlap(at, size, begin, length)) return memory_known;
        pinned += length;
    }
    if (pinned > max_pinned_kib_ << 10) return pinning_failed;
    memory_[at] = size;
    return file_ok;
}

int Storage::drop_memory(Address at) {
    std::lock_guard lock(mutex_);
    if (!memory_.count(at)) {
        machine().note_violation("memory was let go that is not registered");
        return memory_unknown;
    }
    if (num_moving_) machine().note_violation("memory was let go while bytes moved");
    memory_.erase(at);
    return file_ok;
}

int Storage::judge(const Request &request, Address base, int device, bool is_unregistered) {
    std::lock_guard lock(mutex_);
    auto punish = [](int code, const char *words) {
        machine().note_violation(words);
        return code;
    };
    if (!is_open_) return punish(driver_closed, "a transfer without a driver");
    if (device < 0) return punish(wrong_context, "a transfer on a thread without the accelerator");
    const bool is_known = std::any_of(files_.begin(), files_.end(),
                                      [&](auto &each) { return each.get() == request.file; });
    if (!is_known) return punish(file_unknown, "a transfer of a file that is not registered");
    if (request.size == 0) return punish(wrong_value, "a transfer of nothing");
    if ((request.at | request.size | static_cast<Address>(request.offset)) % io_page)
        return punish(wrong_value, "a transfer that is not of whole pages");
    if (is_unregistered) {
        if (machine().place(request.at, request.size, device) != Machine::Place::device)
            return punish(range_error, "a transfer beyond the memory of the device");
        return file_ok;
    }
    auto found = memory_.upper_bound(base ? base : request.at);
    if (found == memory_.begin() || (base && (--found)->first != base))
        return punish(memory_unknown, "a transfer of memory that is not registered");
    if (!base) --found;
    if (request.at < found->first || request.at + request.size > found->first + found->second)
        return punish(range_error, "a transfer beyond the registered memory");
    return file_ok;
}

// -- transfers -------------------------------------------------------------------------------------

Storage::Plan Storage::plan(std::size_t size) {
    Plan made;
    made.size = size;
    if (max_delay_us_) made.delay = std::chrono::microseconds(random_() % max_delay_us_);
    if (size > io_page && static_cast<int>(random_() % 100) < percent_short_)
        made.size = (1 + random_() % (size / io_page - 1)) * io_page;
    if (++num_transfers_ == failing_) {
        made.fault = fault_;
        made.value = fault_value_;
        if (fault_ == Fault::cut) made.size = std::min<std::size_t>(size, fault_value_);
    }
    return made;
}

Ended Storage::perform(const Request &request, const Plan &plan) {
    if (plan.delay.count()) std::this_thread::sleep_for(plan.delay);
    switch (plan.fault) {
    case Fault::error:
        return {request.cookie, request_failed, -plan.value};
    case Fault::lie:
        return {request.cookie, request_complete, -plan.value};
    case Fault::status:
        return {request.cookie, plan.value, 0};
    case Fault::much:
        return {request.cookie, request_complete, static_cast<ssize_t>(request.size) + 1};
    default:
        break;
    }
    if (plan.size == 0) return {request.cookie, request_complete, 0};
    const ssize_t moved = transfer(request, plan.size);
    if (moved < 0) return {request.cookie, request_failed, -errno};
    return {request.cookie, request_complete, moved};
}

ssize_t Storage::move(const std::vector<Request> &requests) {
    Plan whole;
    {
        std::unique_lock lock(mutex_);
        ++num_moving_;
        for (const Request &each : requests) machine().claim(each.at, each.size, !each.write);
        changed_.wait(lock, [this] { return !held_; });
        std::size_t size = 0;
        for (const Request &each : requests) size += each.size;
        whole = plan(size);
    }
    ssize_t moved = 0;
    int problem = 0;
    if (whole.fault == Fault::error || whole.fault == Fault::lie) {
        problem = whole.value;
    } else if (whole.fault == Fault::status) {
        problem = EIO;
    } else {
        for (const Request &each : requests) {
            Plan piece;
            piece.size = std::min(each.size, whole.size - static_cast<std::size_t>(moved));
            if (piece.size == 0) break;
            piece.delay = moved ? std::chrono::microseconds(0) : whole.delay;
            const Ended ended = perform(each, piece);
            if (ended.moved < 0) problem = static_cast<int>(-ended.moved);
            if (ended.moved > 0) moved += ended.moved;
            if (problem || static_cast<std::size_t>(ended.moved) < each.size) break;
        }
        if (whole.fault == Fault::much) ++moved;
    }
    {
        std::lock_guard lock(mutex_);
        for (const Request &each : requests) machine().unclaim(each.at, each.size);
        --num_moving_;
        changed_.notify_all();
    }
    if (!problem) return moved;
    if (problem >= driver_closed) return -problem;
    errno = problem;
    return -1;
}

// -- batches ---------------------------------------------------------------------------------------

bool Storage::is_batch(Batch *batch) {
    return std::any_of(batches_.begin(), batches_.end(), [&](auto &each) {
        return each.get() == batch && !each->is_destroyed;
    });
}

int Storage::make_batch(unsigned max_requests, Batch **made) {
    std::lock_guard lock(mutex_);
    if (!is_open_) return driver_closed;
    if (max_requests == 0 || max_requests > 128) return wrong_value;
    batches_.push_back(std::make_unique<Batch>(Batch{max_requests}));
    *made = batches_.back().get();
    return file_ok;
}

int Storage::submit(Batch *batch, std::vector<Request> requests) {
    std::lock_guard lock(mutex_);
    if (!is_batch(batch)) {
        machine().note_violation("a batch that is not there");
        return wrong_value;
    }
    if (batch->is_busy() || !batch->ended.empty())
        machine().note_violation("a batch was submitted again before its events were taken");
    if (requests.size() > batch->max_requests) {
        machine().note_violation("more requests than the batch was made for");
        return batch_full;
    }
    for (Request &request : requests) {
        if (!request.cookie) machine().note_violation("a request without a cookie");
        machine().claim(request.at, request.size, !request.write);
        ++num_moving_;
        // On the way through host memory each has a buffer, and those without one wait for ever.
        const bool has_buffer = !is_bounced_ || num_moving_ <= static_cast<long>(pool_);
        if (!has_buffer) machine().note_violation("more requests than there are buffers");
        (has_buffer ? batch->waiting : batch->stuck).push_back(request);
    }
    changed_.notify_all();
    const int code = submit_code_;
    submit_code_ = 0;
    return code;
}

int Storage::events(Batch *batch, unsigned least, unsigned *num, std::vector<Ended> &to,
                    const std::chrono::nanoseconds *timeout) {
    std::unique_lock lock(mutex_);
    if (!is_batch(batch) || !num || least > *num) return wrong_value;
    auto has_some = [&] { return batch->ended.size() >= least; };
    if (timeout) {
        changed_.wait_for(lock, *timeout, has_some);
    } else {
        machine().note_violation("events are waited for without a bound");
        changed_.wait(lock, has_some);
    }
    // Some that have not ended are told, too.
    if (!batch->waiting.empty() && batch->ended.size() < *num && random_() % 2)
        to.push_back({batch->waiting.front().cookie, request_pending, 0});
    while (to.size() < *num && !batch->ended.empty()) {
        to.push_back(batch->ended.back());
        batch->ended.pop_back();
    }
    *num = static_cast<unsigned>(to.size());
    return file_ok;
}

int Storage::cancel(Batch *batch) {
    std::lock_guard lock(mutex_);
    if (!is_batch(batch)) {
        machine().note_violation("a batch that is not there was cancelled");
        return wrong_value;
    }
    if (cancels_ == Cancel::refused) return cancel_failed;
    if (cancels_ == Cancel::ignored) return file_ok;
    for (auto *some : {&batch->waiting, &batch->stuck}) {
        for (Request &request : *some) {
            machine().unclaim(request.at, request.size);
            --num_moving_;
            batch->ended.push_back({request.cookie, request_canceled, 0});
        }
        some->clear();
    }
    changed_.notify_all();
    return file_ok;
}

void Storage::destroy(Batch *batch) {
    std::lock_guard lock(mutex_);
    if (!is_batch(batch)) {
        machine().note_violation("a batch that is not there was destroyed");
        return;
    }
    if (batch->is_busy()) machine().note_violation("a batch was destroyed while bytes moved");
    batch->is_destroyed = true;  // its requests may still be on their way
}

bool Storage::take(Batch *&batch, Request &request) {
    std::vector<Batch *> found;
    for (auto &each : batches_)
        if (!each->waiting.empty()) found.push_back(each.get());
    if (held_ || found.empty()) return false;
    batch = found[random_() % found.size()];
    const auto at = batch->waiting.begin() + static_cast<long>(random_() % batch->waiting.size());
    request = *at;
    batch->waiting.erase(at);
    ++batch->num_running;
    return true;
}

void Storage::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        Batch *batch = nullptr;
        Request request{};
        changed_.wait(lock, [&] { return take(batch, request); });
        const Plan made = plan(request.size);
        lock.unlock();
        if (request.size_there && *request.size_there != request.size)
            machine().note_violation("the requests of a batch changed before they ended");
        const Ended ended = perform(request, made);
        lock.lock();
        machine().unclaim(request.at, request.size);
        --num_moving_;
        --batch->num_running;
        const auto among = static_cast<long>(random_() % (batch->ended.size() + 1));
        batch->ended.insert(batch->ended.begin() + among, ended);
        changed_.notify_all();
    }
}

}  // namespace fake
