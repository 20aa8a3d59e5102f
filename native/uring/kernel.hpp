// The part of the kernel's interface, io_uring(7), that the ring uses: declared here, so that neither
// its header nor liburing is needed to build. The numbers are the same on every architecture.
#pragma once

#include <cstdint>

namespace kvtier::uring::kernel {

inline constexpr long kSetup = 425;  // system calls
inline constexpr long kEnter = 426;
inline constexpr long kRegister = 427;

// One request.
struct Sqe {
  std::uint8_t opcode;
  std::uint8_t flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t size;
  std::uint32_t op_flags;
  std::uint64_t user_data;
  std::uint16_t buffer;
  std::uint16_t personality;
  std::int32_t file_index;
  std::uint64_t pad[2];
};
static_assert(sizeof(Sqe) == 64);

inline constexpr std::uint8_t kFixedFile = 1u << 0;  // fd is the number of a registered file

inline constexpr std::uint8_t kReadVector = 1;
inline constexpr std::uint8_t kWriteVector = 2;
inline constexpr std::uint8_t kReadFixed = 4;
inline constexpr std::uint8_t kWriteFixed = 5;
inline constexpr std::uint8_t kCancel = 14;
inline constexpr std::uint8_t kRead = 22;
inline constexpr std::uint8_t kWrite = 23;
inline constexpr std::uint8_t kReadVectorFixed = 60;  // Linux 6.15
inline constexpr std::uint8_t kWriteVectorFixed = 61;

// One piece of memory of a vectored request, as struct iovec has it.
struct Vector {
  std::uint64_t address, size;
};
static_assert(sizeof(Vector) == 16);

// One completion.
struct Cqe {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t user_address;
};

struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  std::uint64_t user_address;
};

struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
  std::uint32_t reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

inline constexpr std::uint32_t kCoopTaskrun = 1u << 8;  // no interrupts for completions; Linux 5.19

inline constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
inline constexpr std::uint32_t kFeatureExtArg = 1u << 8;  // 5.11

inline constexpr std::uint32_t kGetEvents = 1u << 0;
inline constexpr std::uint32_t kExtArg = 1u << 3;

struct Timespec {
  std::int64_t seconds, nanoseconds;
};

struct GetEventsArg {
  std::uint64_t sigmask;
  std::uint32_t sigmask_size, pad;
  std::uint64_t timespec;
};

// Which requests the kernel knows.
struct ProbedRequest {
  std::uint8_t opcode, reserved;
  std::uint16_t flags;
  std::uint32_t more;
};
struct Probe {
  std::uint8_t last_opcode, num_opcodes;
  std::uint16_t reserved;
  std::uint32_t more[3];
  ProbedRequest requests[64];
};
static_assert(sizeof(Probe) == 16 + 64 * 8);

inline constexpr std::uint16_t kIsSupported = 1u << 0;

inline constexpr unsigned kRegisterBuffers = 0;
inline constexpr unsigned kUnregisterBuffers = 1;
inline constexpr unsigned kRegisterFiles = 2;
inline constexpr unsigned kUnregisterFiles = 3;
inline constexpr unsigned kRegisterProbe = 8;

inline constexpr std::uint64_t kSqRingOffset = 0;  // of mmap; the CQ ring lies in the same mapping
inline constexpr std::uint64_t kSqesOffset = 0x10000000;

}  // namespace kvtier::uring::kernel
