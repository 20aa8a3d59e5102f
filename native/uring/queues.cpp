#include "uring/queues.hpp"

#include "errors.hpp"

#if defined(__linux__) && !defined(KVTIER_NO_URING)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

namespace kvtier::uring {

namespace {

// A system call: its result, or -errno.
int call(long number, auto... arguments) {
  const long result = syscall(number, arguments...);
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace

Queues::Mapping::~Mapping() {
  if (start_ != nullptr) munmap(start_, num_bytes_);
}

void Queues::Mapping::map(int fd, std::size_t num_bytes, std::uint64_t offset) {
  void* const start = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                           static_cast<off_t>(offset));
  if (start == MAP_FAILED)
    throw NativeError(std::string("io_uring: mapping its rings failed: ") + std::strerror(errno));
  start_ = start;
  num_bytes_ = num_bytes;
}

Queues::Descriptor::~Descriptor() {
  if (number >= 0) close(number);
}

Queues::Queues(unsigned num_requests) : owner_(getpid()) {
  int made = -EINVAL;
  for (const std::uint32_t flags : {kernel::kCoopTaskrun, std::uint32_t{0}}) {
    params_ = {};
    params_.flags = flags;
    made = call(kernel::kSetup, num_requests, &params_);
    if (made != -EINVAL) break;  // an older kernel does not know the flag
  }
  if (made < 0)
    throw NativeError(std::string("io_uring is not available: ") + std::strerror(-made) +
                      (made == -ENOMEM ? "; raise the limit on locked memory" : ""));
  ring_.number = made;
  if ((params_.features & kernel::kFeatureSingleMmap) == 0 ||
      (params_.features & kernel::kFeatureExtArg) == 0)
    throw NativeError("io_uring is too old: Linux 5.11 or newer is needed");
  const std::size_t sq_bytes = params_.sq.array + params_.sq_entries * sizeof(unsigned);
  const std::size_t cq_bytes = params_.cq.cqes + params_.cq_entries * sizeof(kernel::Cqe);
  rings_.map(ring_.number, std::max(sq_bytes, cq_bytes), kernel::kSqRingOffset);
  requests_.map(ring_.number, params_.sq_entries * sizeof(kernel::Sqe), kernel::kSqesOffset);
  for (unsigned i = 0; i < params_.sq_entries; ++i) rings_.at<unsigned>(params_.sq.array)[i] = i;
}

Queues::~Queues() {
  if (getpid() != owner_) return;
  // The kernel takes a ring apart some time after it was closed; file and memory are free at once.
  if (has_file_) call(kernel::kRegister, ring_.number, kernel::kUnregisterFiles, nullptr, 0u);
  if (has_buffers_) call(kernel::kRegister, ring_.number, kernel::kUnregisterBuffers, nullptr, 0u);
}

void Queues::check_owner() const {
  if (const long here = getpid(); here != owner_)
    throw NativeError("the ring belongs to process " + std::to_string(owner_) + ", and process " +
                      std::to_string(here) + " was forked from it; open another ring here");
}

bool Queues::knows(std::uint8_t opcode) const {
  kernel::Probe probe{};
  const int result = call(kernel::kRegister, ring_.number, kernel::kRegisterProbe, &probe,
                          static_cast<unsigned>(std::size(probe.requests)));
  return result >= 0 && opcode <= probe.last_opcode &&
         (probe.requests[opcode].flags & kernel::kIsSupported) != 0;
}

int Queues::register_file(int fd) {
  const int result = call(kernel::kRegister, ring_.number, kernel::kRegisterFiles, &fd, 1u);
  has_file_ = result >= 0;
  return std::min(result, 0);
}

int Queues::register_buffers(std::span<const kernel::Vector> buffers) {
  const int result = call(kernel::kRegister, ring_.number, kernel::kRegisterBuffers, buffers.data(),
                          static_cast<unsigned>(buffers.size()));
  has_buffers_ = has_buffers_ || result >= 0;
  return std::min(result, 0);
}

kernel::Sqe& Queues::next() {
  const unsigned mask = *rings_.at<unsigned>(params_.sq.ring_mask);
  kernel::Sqe& request = requests_.at<kernel::Sqe>(0)[tail_++ & mask];
  request = {};
  return request;
}

int Queues::enter(unsigned num_wanted, std::optional<double> timeout_s) {
  store(rings_.at<unsigned>(params_.sq.tail), tail_);
  const unsigned num_requests = tail_ - load(rings_.at<unsigned>(params_.sq.head));
  kernel::Timespec time{};
  kernel::GetEventsArg argument{};
  if (timeout_s) {
    const double seconds = std::max(*timeout_s, 0.0);
    time.seconds = static_cast<std::int64_t>(seconds);
    time.nanoseconds =
        static_cast<std::int64_t>((seconds - static_cast<double>(time.seconds)) * 1e9);
    argument.timespec = reinterpret_cast<std::uint64_t>(&time);
  }
  const int result =
      call(kernel::kEnter, ring_.number, num_requests, num_wanted,
           kernel::kGetEvents | kernel::kExtArg, &argument, sizeof(argument));
  return std::min(result, 0);
}

}  // namespace kvtier::uring

#else  // another system: queues cannot be made, and so none of the rest is reached

namespace kvtier::uring {

Queues::Mapping::~Mapping() = default;
Queues::Descriptor::~Descriptor() = default;

Queues::Queues(unsigned) { throw NativeError("io_uring is not available: this is not Linux"); }
Queues::~Queues() = default;

void Queues::check_owner() const {}
bool Queues::knows(std::uint8_t) const { return false; }
int Queues::register_file(int) { return 0; }
int Queues::register_buffers(std::span<const kernel::Vector>) { return 0; }
kernel::Sqe& Queues::next() { return *requests_.at<kernel::Sqe>(0); }
int Queues::enter(unsigned, std::optional<double>) { return 0; }

}  // namespace kvtier::uring

#endif
