// Which way of copying is faster here, measured on the work itself.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace kvtier::copy {

enum class Path : std::uint8_t { kPlain, kStreaming };

// Hands out a path per part of a batch. Of every kCycle parts the first 2 * kSamples are timed,
// half on each path, and the faster one serves the others. Non-temporal stores win by two thirds on
// some processors and lose a third on others, so no constant would do; timing the real copies needs
// no start-up, and a wrong choice (say, while a new arena's pages came in) is corrected one cycle
// later. The slower path costs less than one part in a hundred.
class PathChoice {
 public:
  struct Turn {
    Path path;
    bool timed;  // tell `record` how long it took
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

}  // namespace kvtier::copy
