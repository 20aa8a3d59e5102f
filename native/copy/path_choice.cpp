#include "copy/path_choice.hpp"

#include <algorithm>

namespace kvtier::copy {

PathChoice::Turn PathChoice::next() {
  const std::uint64_t turn = num_turns_.fetch_add(1, std::memory_order_relaxed) % kCycle;
  if (turn >= 2 * kSamples) return {best_.load(std::memory_order_relaxed), false};
  return {turn % 2 == 0 ? Path::kPlain : Path::kStreaming, true};
}

void PathChoice::record(Path path, double ns_per_byte) {
  // A lost sample does no harm. Waiting for the mutex would never end in a child that was forked
  // while another thread held it.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  const auto which = static_cast<std::size_t>(path);
  if (num_samples_[which] < kSamples) samples_[which][num_samples_[which]++] = ns_per_byte;
  if (num_samples_[0] < kSamples || num_samples_[1] < kSamples) return;

  // The lower quartile: what disturbs a copy only ever makes it slower.
  const auto typical = [](std::array<double, kSamples>& samples) {
    const auto quartile = samples.begin() + kSamples / 4;
    std::nth_element(samples.begin(), quartile, samples.end());
    return *quartile;
  };
  const bool streaming = typical(samples_[1]) < typical(samples_[0]);
  best_.store(streaming ? Path::kStreaming : Path::kPlain, std::memory_order_relaxed);
  num_samples_ = {};
}

}  // namespace kvtier::copy
