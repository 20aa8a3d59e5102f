// A machine with two accelerators that are not there: memory, streams, events, and a strict judge.
//
// Nothing is copied when it is submitted. One thread runs the streams later, in an order that the
// seed chooses, the copies of a batch shuffled. What a real machine would punish at some unlucky
// moment is noticed at once and written down as a violation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace fake {

using Address = std::uintptr_t;

inline constexpr int num_devices = 2;

enum class Kind { device, pinned };

// Memory that copies may touch. alias: where the fake itself reaches it; host code can't reach
// device memory at `begin`.
struct Range {
    Address begin;
    std::size_t size;
    Kind kind;
    int device;  // of device memory; whose driver locked it, of host memory
    Address alias;
    bool is_owned;       // mapped by the fake
    bool is_registered;  // was there before it was page-locked
    bool contains(Address at, std::size_t bytes) const {
        return at >= begin && at + bytes <= begin + size;
    }
    bool touches(Address at, std::size_t bytes) const {
        return at < begin + size && begin < at + bytes;
    }
};

struct Copy {
    Address dst;
    Address src;
    std::size_t size;
};

inline bool overlap(Address a, std::size_t a_size, Address b, std::size_t b_size) {
    return a < b + b_size && b < a + a_size;
}

struct Event;

// How far a stream has come, and what it has waited for: the last operation of each stream that is
// done before whatever comes next.
using Clock = std::map<const void *, std::uint64_t>;

struct Op {
    enum class What { copies, fill, record, wait } what = What::copies;
    std::uint64_t seq = 0;
    std::vector<Copy> copies;
    // Late reads: the caller's arrays, to be read when the operation runs.
    const std::uint64_t *dsts = nullptr, *srcs = nullptr, *sizes = nullptr;
    std::size_t count = 0;
    int value = 0;
    Event *event = nullptr;
    std::uint64_t version = 0;
};

struct Stream {
    int device;
    bool is_compute = false;
    std::uint64_t last_seq = 0;
    Clock clock;
    std::deque<Op> ops;
    bool is_running = false;
};

struct Event {
    int device;
    std::uint64_t recorded = 0;   // versions: how often it was recorded
    std::uint64_t completed = 0;  // and how many of these have been reached
    Clock clock;
    unsigned flags = 0;
    bool is_destroyed = false;
};

class Machine {
public:
    Machine();
    ~Machine();

    void reset(unsigned seed, bool late_reads, int max_delay_us);

    // What tests say.
    void hold(bool on);
    void fail_call(const std::string &name, int nth, int code);
    void fail_entry(int nth_batch, std::size_t entry, int code);
    void fail_late(int nth_copy, int code);
    void lose_device(int code);
    void adopt(Address at, std::size_t size, int device);
    void disown(Address at);
    void cut(Address at);  // device memory is two allocations, the second of which begins here
    bool peek(Address at, void *to, std::size_t size);
    bool poke(Address at, const void *from, std::size_t size);
    std::vector<std::string> violations();
    std::vector<std::string> leaks();
    std::map<std::string, long> counts();
    long num_pending();

    // Every call of a driver begins here: counts it. Returns the code that a test wants, or 0.
    int enter(const char *name);
    void note_violation(const std::string &what);

    // Memory. 0 or false where it is refused.
    Address allocate(std::size_t size, int device, Kind kind);
    bool release(Address at, Kind kind);
    enum class Lock { ok, overlaps, none };
    Lock lock(Address at, std::size_t size, int device);
    bool unlock(Address at);
    // Of host memory: whether it is page-locked as one piece; partly locked is `broken`.
    enum class Place { device, pinned, pageable, broken, other_device };
    Place place(Address at, std::size_t size, int device);

    // Bytes that storage moves, on no stream: until `unclaim` no stream may touch them, unless both
    // only read. `is_written`: the memory is.
    void claim(Address at, std::size_t size, bool is_written);
    void unclaim(Address at, std::size_t size);

    // Streams and events.
    Stream *make_stream(int device, bool is_compute = false);
    bool is_stream(const void *stream);
    // The stream of a device that stands for handle 0. Compute may use it; copies may not.
    Stream *legacy_stream(int device);
    bool destroy_stream(Stream *stream);
    Event *make_event(int device);
    bool is_event(const void *event);
    bool destroy_event(Event *event);
    void record(Event *event, Stream *stream);
    void wait(Stream *stream, Event *event);
    bool is_complete(Event *event);
    bool is_complete(Stream *stream);
    // Block until done; false after `timeout_ms`. Late errors are returned by `late_error`.
    bool synchronize(Event *event, int timeout_ms = 30'000);
    bool synchronize(Stream *stream, int timeout_ms = 30'000);
    int late_error();

    // Copies. Judged already; may read `late` arrays when they run.
    void submit(Stream *stream, std::vector<Copy> copies);
    void submit_late(Stream *stream, std::vector<Copy> copies, const std::uint64_t *dsts,
                     const std::uint64_t *srcs, const std::uint64_t *sizes);
    void submit_fill(Stream *stream, Address at, std::size_t size, int value);
    // Copies that may not wait: the stream is finished, then they are done.
    bool copy_now(Stream *stream, const std::vector<Copy> &copies);
    // The entry of this batch that has to fail, and its code; or count.
    std::pair<std::size_t, int> failing_entry(std::size_t count);
    bool late_reads() const { return late_reads_; }
    void note_peak(std::size_t bytes);

private:
    friend struct Judge;
    Range *find(Address at, std::size_t size);
    bool is_cut(Address at, std::size_t size);
    Address reach(Address at, std::size_t size);
    void run();
    Stream *next_runnable();
    void execute(Op &op);
    void do_copies(std::vector<Copy> copies);
    void enqueue(Stream *stream, Op op);
    void judge(Stream *stream, const std::vector<Copy> &copies);
    bool has_pending(Address at, std::size_t size);
    void drop_memory(Range &range);

    struct Claim {
        Address at;
        std::size_t size;
        bool is_written;
        bool conflicts(Address other, std::size_t other_size, bool other_is_written) const {
            return (is_written || other_is_written) && overlap(at, size, other, other_size);
        }
        bool conflicts(const Copy &copy) const {
            return conflicts(copy.dst, copy.size, true) || conflicts(copy.src, copy.size, false);
        }
    };
    std::vector<Claim> claims_;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread worker_;
    bool stops_ = false, held_ = false;
    std::mt19937_64 random_{0};
    bool late_reads_ = false;
    int max_delay_us_ = 0;
    std::vector<Range> ranges_;
    std::vector<Address> cuts_;
    std::vector<std::unique_ptr<Stream>> streams_;
    std::map<int, Stream *> legacy_;
    std::vector<std::unique_ptr<Event>> events_;
    std::vector<std::string> violations_;
    std::map<std::string, long> counts_;
    std::map<std::string, std::pair<long, int>> failing_calls_;
    long num_batches_ = 0, failing_batch_ = 0;
    std::size_t failing_entry_ = 0;
    int failing_entry_code_ = 0;
    long num_copies_ = 0, failing_copy_ = 0;
    int failing_copy_code_ = 0, late_error_ = 0, lost_code_ = 0;
    std::size_t queued_bytes_ = 0;
};

Machine &machine();

}  // namespace fake
