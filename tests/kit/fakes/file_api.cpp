// The calls of a vendor's file library. VERSION: 10000 for cuFile, 20000 for hipFile, 30000 for NDS,
// and its version as cuFile counts, 1000 for each major and 10 for each minor.
#include <time.h>

#include <algorithm>
#include <cstring>

#include "exports.hpp"
#include "storage.hpp"

using fake::Address;
using fake::Batch;
using fake::Ended;
using fake::File;
using fake::machine;
using fake::Request;
using fake::storage;

#define FILE_API (VERSION / 10000)
#define FILE_VERSION (VERSION % 10000)

#define CAT(prefix, call) prefix##call
// Variables that forbid the way through host memory: cuFile asks when its driver opens, up to 1.15
// (1.20 has a call for it alone); hipFile when a file is registered.
#if FILE_API == 1
#define NAME(call) CAT(cuFile, call)
#define PREFIX "cuFile"
constexpr const char *driver_compat = FILE_VERSION < 1200 ? "CUFILE_ALLOW_COMPAT_MODE" : nullptr;
constexpr const char *file_compat = nullptr;
#elif FILE_API == 2
#define NAME(call) CAT(hipFile, call)
#define PREFIX "hipFile"
constexpr const char *driver_compat = nullptr;
constexpr const char *file_compat = "HIPFILE_ALLOW_COMPAT_MODE";
#else
#define NAME(call) CAT(NdsFile, call)
#define PREFIX "NdsFile"
constexpr const char *driver_compat = nullptr;
constexpr const char *file_compat = nullptr;
#endif

// The accelerator of the calling thread, asked of its own driver; -1 where it has none.
#if FILE_API == 1
extern "C" int cuStreamSynchronize(void *stream);
static int device() {
    const int code = cuStreamSynchronize(nullptr);
    return code == 3 || code == 201 ? -1 : 0;  // before cuInit; without a context
}
#elif FILE_API == 2
static int device() { return 0; }  // every thread has the first one
#else
extern "C" int aclrtSynchronizeStream(void *stream);
static int device() { return aclrtSynchronizeStream(nullptr) == 107002 ? -1 : 0; }
#endif

namespace {

struct Status {
    int code;
#if FILE_API != 3
    int driver_code;
#endif
};

Status status(int code) {
    Status made{};
    made.code = code;
    return made;
}

#if FILE_API == 3
struct Descriptor {
    int fd;
};
int fd_of(const Descriptor *descriptor) { return descriptor->fd; }
#else
struct Descriptor {
    int kind;
    union {
        int fd;
        void *pointer;
    } name;
    const void *operations;
};
static_assert(sizeof(Descriptor) == 24);
int fd_of(const Descriptor *descriptor) {
    return descriptor->kind == 1 && !descriptor->operations ? descriptor->name.fd : -1;
}
#endif

constexpr bool looks_memory_up = FILE_API == 3;

ssize_t move(void *file, void *base, std::size_t size, off_t offset, off_t base_offset,
             bool write) {
    const Address begin = reinterpret_cast<Address>(base);
    const Request request{static_cast<File *>(file), begin + static_cast<Address>(base_offset),
                          size, offset, write};
    if (looks_memory_up && (begin | static_cast<Address>(base_offset)) % fake::io_page)
        machine().note_violation("a base that is not at a page");
    if (int code = storage().judge(request, begin, device(), looks_memory_up)) return -code;
    return storage().move({request});
}

}  // namespace

#define STATUS_ENTER(call) \
    if (const int code_ = machine().enter(PREFIX #call)) return status(code_)
#define MOVE_ENTER(call) \
    if (const int code_ = machine().enter(PREFIX #call)) return -code_

// -- what all have ---------------------------------------------------------------------------------

FAKE Status NAME(DriverOpen)() {
    STATUS_ENTER(DriverOpen);
    return status(storage().open(driver_compat));
}
FAKE Status NAME(DriverClose)() {
    STATUS_ENTER(DriverClose);
#if FILE_API == 1
    machine().note_violation("the driver was closed by the call of an older version");
#endif
    return status(storage().close());
}
FAKE Status NAME(HandleRegister)(void **handle, Descriptor *descriptor) {
    STATUS_ENTER(HandleRegister);
    if (!handle || !descriptor) return status(fake::wrong_value);
    File *made = nullptr;
    const int code = storage().add_file(fd_of(descriptor), file_compat, &made);
    *handle = made;
    return status(code);
}
FAKE void NAME(HandleDeregister)(void *handle) {
    machine().enter(PREFIX "HandleDeregister");
    storage().drop_file(static_cast<File *>(handle));
}
FAKE ssize_t NAME(Read)(void *file, void *base, std::size_t size, off_t offset,
                        off_t base_offset) {
    MOVE_ENTER(Read);
    return move(file, base, size, offset, base_offset, false);
}
FAKE ssize_t NAME(Write)(void *file, void *base, std::size_t size, off_t offset,
                         off_t base_offset) {
    MOVE_ENTER(Write);
    return move(file, base, size, offset, base_offset, true);
}

// -- cuFile and hipFile ----------------------------------------------------------------------------

#if FILE_API != 3
FAKE Status NAME(BufRegister)(const void *base, std::size_t size, int flags) {
    STATUS_ENTER(BufRegister);
    if (flags) return status(fake::wrong_value);
    if (device() < 0) return status(fake::wrong_context);
    return status(storage().add_memory(reinterpret_cast<Address>(base), size, device()));
}
FAKE Status NAME(BufDeregister)(const void *base) {
    STATUS_ENTER(BufDeregister);
    return status(storage().drop_memory(reinterpret_cast<Address>(base)));
}
FAKE Status NAME(DriverSetMaxPinnedMemSize)(std::size_t kib) {
    STATUS_ENTER(DriverSetMaxPinnedMemSize);
    return status(storage().set_max_pinned(kib));
}

namespace {
#if FILE_API == 1
using Size = unsigned;
using KernelSize = std::size_t;
#else
using Size = std::uint64_t;
using KernelSize = std::uint64_t;
#endif
struct Properties {
    struct {
        unsigned major, minor;
        KernelSize poll_kib, max_direct_kib;
        unsigned status, control;
    } kernel;
    unsigned features;
    Size max_cache, cache_per_buffer, max_pinned;
    unsigned max_batch, batch_timeout_ms;
};
static_assert(sizeof(Properties) == (FILE_API == 1 ? 56 : 72));
}  // namespace

FAKE Status NAME(DriverGetProperties)(Properties *properties) {
    STATUS_ENTER(DriverGetProperties);
    *properties = {};
    properties->kernel.major = storage().is_bounced() ? 0 : 2;
    properties->kernel.max_direct_kib = 16384;
    properties->max_pinned = static_cast<Size>(storage().max_pinned_kib());
    properties->max_batch = 128;
    return status(fake::file_ok);
}
#endif

#if FILE_API == 2
FAKE Status hipFileGetVersion(unsigned *major, unsigned *minor, unsigned *patch) {
    STATUS_ENTER(GetVersion);
    *major = FILE_VERSION / 1000;
    *minor = FILE_VERSION % 1000 / 10;
    *patch = 0;
    return status(fake::file_ok);
}
#endif

// -- cuFile alone ----------------------------------------------------------------------------------

#if FILE_API == 1
FAKE Status cuFileDriverClose_v2() {
    STATUS_ENTER(DriverClose_v2);
    return status(storage().close());
}
FAKE Status cuFileGetVersion(int *version) {
    STATUS_ENTER(GetVersion);
    *version = FILE_VERSION;
    return status(fake::file_ok);
}
#if FILE_VERSION >= 1140
FAKE Status cuFileSetParameterBool(int parameter, bool value) {
    STATUS_ENTER(SetParameterBool);
    if (parameter != 1 && parameter != 2) return status(fake::wrong_value);
    return status(parameter == 1 ? storage().allow_bounce(value) : fake::file_ok);
}
#endif
#if FILE_VERSION >= 1150
FAKE Status cuFileSetParameterPosixPoolSlabArray(const std::size_t *kib, const std::size_t *counts,
                                                 int num) {
    STATUS_ENTER(SetParameterPosixPoolSlabArray);
    return status(storage().set_pool(kib, counts, num));
}
#endif

namespace {
struct Parameters {
    int mode;
    union {
        struct {
            void *base;
            off_t file_offset, base_offset;
            std::size_t size;
        } batch;
    } u;
    void *file;
    int opcode;
    void *cookie;
};
static_assert(sizeof(Parameters) == 64);
struct Event {
    void *cookie;
    int status;
    std::size_t moved;
};
static_assert(sizeof(Event) == 24);
}  // namespace

FAKE Status cuFileBatchIOSetUp(void **batch, unsigned max_requests) {
    STATUS_ENTER(BatchIOSetUp);
    Batch *made = nullptr;
    const int code = storage().make_batch(max_requests, &made);
    *batch = made;
    return status(code);
}
FAKE Status cuFileBatchIOSubmit(void *batch, unsigned num, Parameters *some, unsigned flags) {
    STATUS_ENTER(BatchIOSubmit);
    if (num == 0 || !some || flags) return status(fake::wrong_value);
    std::vector<Request> requests;
    for (const Parameters *each = some; each < some + num; ++each) {
        const auto &place = each->u.batch;
        const Address base = reinterpret_cast<Address>(place.base);
        if (each->mode != 1 || (each->opcode != 0 && each->opcode != 1))
            return status(fake::wrong_value);
        requests.push_back({static_cast<File *>(each->file),
                            base + static_cast<Address>(place.base_offset), place.size,
                            place.file_offset, each->opcode == 1, each->cookie, &place.size});
        if (storage().judge(requests.back(), base, device(), false))
            return status(fake::wrong_value);
    }
    return status(storage().submit(static_cast<Batch *>(batch), requests));
}
FAKE Status cuFileBatchIOGetStatus(void *batch, unsigned least, unsigned *num, Event *events,
                                   timespec *timeout) {
    STATUS_ENTER(BatchIOGetStatus);
    std::chrono::nanoseconds wait{0};
    if (timeout)
        wait = std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec);
    std::vector<Ended> ended;
    const int code = storage().events(static_cast<Batch *>(batch), least, num, ended,
                                      timeout ? &wait : nullptr);
    for (std::size_t at = 0; at < ended.size(); ++at)
        events[at] = {ended[at].cookie, ended[at].status, static_cast<std::size_t>(ended[at].moved)};
    return status(code);
}
FAKE Status cuFileBatchIOCancel(void *batch) {
    STATUS_ENTER(BatchIOCancel);
    return status(storage().cancel(static_cast<Batch *>(batch)));
}
FAKE void cuFileBatchIODestroy(void *batch) {
    machine().enter("cuFileBatchIODestroy");
    storage().destroy(static_cast<Batch *>(batch));
}

#if FILE_VERSION >= 1200
namespace {
struct Vector {
    void *base;
    std::size_t size;
};

ssize_t move_vectors(void *file, const Vector *vectors, std::size_t num, off_t offset,
                     unsigned flags, bool write) {
    if (!vectors || num == 0 || flags) return -fake::wrong_value;
    std::vector<Request> requests;
    for (const Vector *each = vectors; each < vectors + num; ++each) {
        requests.push_back({static_cast<File *>(file), reinterpret_cast<Address>(each->base),
                            each->size, offset, write});
        if (int code = storage().judge(requests.back(), 0, device(), false)) return -code;
        offset += static_cast<off_t>(each->size);
    }
    return storage().move(requests);
}
}  // namespace

FAKE ssize_t cuFileReadv(void *file, const Vector *vectors, std::size_t num, off_t offset,
                         unsigned flags) {
    MOVE_ENTER(Readv);
    return move_vectors(file, vectors, num, offset, flags, false);
}
FAKE ssize_t cuFileWritev(void *file, const Vector *vectors, std::size_t num, off_t offset,
                          unsigned flags) {
    MOVE_ENTER(Writev);
    return move_vectors(file, vectors, num, offset, flags, true);
}
#endif
#endif

// -- what tests say --------------------------------------------------------------------------------

FAKE void fake_storage_reset(unsigned seed, int max_delay_us, int percent_short, int is_bounced) {
    storage().reset(seed, max_delay_us, percent_short, is_bounced != 0);
}
FAKE void fake_storage_hold(int on) { storage().hold(on != 0); }
FAKE void fake_storage_fail(int nth, int fault, int value) {
    storage().fail(nth, static_cast<fake::Fault>(fault), value);
}
FAKE void fake_storage_cancels(int how) { storage().cancels(static_cast<fake::Cancel>(how)); }
FAKE void fake_storage_fail_submit(int code) { storage().fail_submit(code); }
FAKE void fake_storage_limit_pinned(std::size_t kib) { storage().limit_pinned(kib); }
FAKE long fake_storage_num_moving() { return storage().num_moving(); }
FAKE long fake_storage_num_transfers() { return storage().num_transfers(); }
FAKE long fake_storage_leaks(char *to, std::size_t size) {
    std::string all;
    for (const std::string &line : storage().leaks()) all += line + "\n";
    if (size == 0) return 0;
    const std::size_t length = std::min(all.size(), size - 1);
    std::memcpy(to, all.data(), length);
    to[length] = 0;
    return static_cast<long>(length);
}
