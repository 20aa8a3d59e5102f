// What moves bytes between files and the memory of a device that is not there: the part that the
// vendors' file libraries have in common.
//
// The bytes go to real files. A batch moves on a thread of its own, late and in any order; what a
// real library would take, and punish at some unlucky moment, is noticed and written down.
#pragma once

#include <sys/types.h>

#include <chrono>

#include "machine.hpp"

namespace fake {

inline constexpr std::size_t io_page = 4096;
// Buffers of the way through host memory, where nobody set their number.
inline constexpr std::size_t default_pool = 64;
inline constexpr std::size_t default_pinned_kib = std::size_t{32} << 20;

// All vendors count alike.
enum FileCode : int {
    file_ok = 0,
    driver_closed = 5001,
    driver_closing = 5006,
    not_on_this_file = 5008,
    range_error = 5014,
    wrong_context = 5015,
    wrong_open_flag = 5019,
    not_direct = 5020,
    wrong_value = 5022,
    memory_known = 5023,
    memory_unknown = 5024,
    driver_open = 5026,
    file_unknown = 5027,
    file_known = 5028,
    driver_absent = 5033,
    pinning_failed = 5036,
    batch_full = 5037,
    cancel_failed = 5042,
};

// Of the requests of a batch.
enum RequestStatus : int {
    request_pending = 2,
    request_invalid = 4,
    request_canceled = 8,
    request_complete = 16,
    request_timeout = 32,
    request_failed = 64,
};

// What may happen to the nth transfer. error: it fails. lie: a batch says that it is complete, and
// in the same event that it failed. status: a batch gives it this status. cut: it moves so many
// bytes. much: it says one more than it was asked for.
enum class Fault : int { none, error, lie, status, cut, much };

// How a cancel goes: what has not begun is cancelled; nothing is, though it says so; it is refused.
enum class Cancel : int { works, ignored, refused };

struct File {
    int fd;
};

// A piece of memory and a place in a file. slot, size_there: where the caller keeps what it asked
// for, which has to stay as it was.
struct Request {
    File *file;
    Address at;
    std::size_t size;
    off_t offset;
    bool write;
    void *cookie = nullptr;
    const std::size_t *size_there = nullptr;
};

struct Ended {
    void *cookie;
    int status;
    ssize_t moved;
};

struct Batch {
    unsigned max_requests;
    std::vector<Request> waiting = {};
    std::vector<Request> stuck = {};
    std::vector<Ended> ended = {};
    unsigned num_running = 0;
    bool is_destroyed = false;
    bool is_busy() const { return num_running || !waiting.empty() || !stuck.empty(); }
};

class Storage {
public:
    Storage();

    // What tests say.
    void reset(unsigned seed, int max_delay_us, int percent_short, bool is_bounced);
    void hold(bool on);
    void fail(int nth, Fault fault, int value);
    void cancels(Cancel how);
    void fail_submit(int code);  // the next one is begun, and answered with this
    void limit_pinned(std::size_t kib);
    long num_moving();
    long num_transfers();
    std::vector<std::string> leaks();

    // The driver. compat: the variable that allows the way through host memory.
    int open(const char *compat);
    int allow_bounce(bool on);
    int close();
    int set_pool(const std::size_t *kib, const std::size_t *counts, int num);
    bool is_bounced() const { return is_bounced_; }
    std::size_t max_pinned_kib();
    int set_max_pinned(std::size_t kib);

    // Files and memory. compat: the variable that allows the way through host memory.
    int add_file(int fd, const char *compat, File **made);
    void drop_file(File *file);
    int add_memory(Address at, std::size_t size, int device);
    int drop_memory(Address at);

    // Whether a transfer is allowed: 0, or a code. base: of the registration; 0 where the library
    // finds it by itself, among registrations or, for `is_unregistered`, among all memory.
    int judge(const Request &request, Address base, int device, bool is_unregistered);
    // Neighbours in the file, judged already; bytes, or -1 with errno, or -code.
    ssize_t move(const std::vector<Request> &requests);

    // Batches.
    int make_batch(unsigned max_requests, Batch **made);
    int submit(Batch *batch, std::vector<Request> requests);
    int events(Batch *batch, unsigned least, unsigned *num, std::vector<Ended> &to,
               const std::chrono::nanoseconds *timeout);
    int cancel(Batch *batch);
    void destroy(Batch *batch);

private:
    struct Plan {
        Fault fault = Fault::none;
        int value = 0;
        std::size_t size = 0;
        std::chrono::microseconds delay{0};
    };
    Plan plan(std::size_t size);
    Ended perform(const Request &request, const Plan &plan);
    bool take(Batch *&batch, Request &request);
    bool is_batch(Batch *batch);
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread worker_;
    std::mt19937_64 random_{0};
    bool held_ = false, is_open_ = false, is_bounced_ = false, may_bounce_ = true;
    int max_delay_us_ = 0, percent_short_ = 0;
    Cancel cancels_ = Cancel::works;
    std::vector<std::unique_ptr<File>> files_;
    std::map<Address, std::size_t> memory_;
    std::vector<std::unique_ptr<Batch>> batches_;
    std::size_t max_pinned_kib_ = default_pinned_kib, pool_ = default_pool;
    long num_transfers_ = 0, num_moving_ = 0, failing_ = 0;
    Fault fault_ = Fault::none;
    int fault_value_ = 0, submit_code_ = 0;
};

Storage &storage();

}  // namespace fake
