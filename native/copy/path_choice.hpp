// Choice of the faster of two ways of copying, measured on the work itself.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace kvtier::copy {

enum class Path : std::uint8_t { kPlain, kStreaming };

// Chooses a path per part of a batch. Of every kCycle parts the first 2 * kSamples are timed, half
// on each path, and the faster path copies the others. Non-temporal stores are two thirds faster on
// some processors and a third slower on others, so a constant would not do. Timing the real copies
// needs no start-up, and a wrong choice (for instance while a new arena is faulted in) is corrected
// one cycle later. The samples cost less than one part in a hundred.
class PathChoice {
 public:
  struct Turn {
    Path path;
    bool timed;  // pass the time that it took to `record`
  };

  Turn next();
  void record(Path path, double ns_per_byte);

 private:
  static constexpr std::size_t kSamples = 8;
  static constexpr std::uint64_t kCycle = 1024;

  std::atomic<std::uint64_t> num_turns_{0};
  std::atomic<Path> best_{Path::kPlain};

  std::mutex mutex_;  // guards what follows
  std::array<std::array<double, kSamples>, 2> samples_{};
  std::array<std::size_t, 2> num_samples_{};
};

// Nanoseconds that this thread has run; on a busy machine, wall time would time the neighbours.
inline double thread_ns() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  std::timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
#else
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::nano>(now).count();
#endif
}

// Copies `num_bytes` by copy(path), on the path whose turn it is.
template <typename Copy>
void take_turn(PathChoice& choice, std::size_t num_bytes, const Copy& copy) {
  const PathChoice::Turn turn = choice.next();
  if (!turn.timed) {
    copy(turn.path);
    return;
  }
  const double began = thread_ns();
  copy(turn.path);
  choice.record(turn.path, (thread_ns() - began) / static_cast<double>(num_bytes));
}

}  // namespace kvtier::copy
