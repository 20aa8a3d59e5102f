// Names of prefixes, and random numbers that are the same on every machine.
#pragma once

#include <cstdint>

namespace kvtier::policy {

using Key = std::uint64_t;

// The end of splitmix64 (Steele, Lea and Flood, 2014).
inline std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58'476D'1CE4'E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D0'49BB'1331'11EB;
  return bits ^ (bits >> 31);
}

inline constexpr std::uint64_t kStep = 0x9E37'79B9'7F4A'7C15;

// Returns the name of a prefix, from the name of the blocks before its last one and the key of this
// one. Two blocks therefore have the same name only if all blocks before them are the same.
inline Key chained(Key before, Key key) { return mixed(before + key + kStep); }

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint32_t below(std::uint32_t end) {
    const std::uint32_t number = next_below(end);
    state_ += kStep;
    return number;
  }
  // Return the next result of `below`.
  std::uint32_t next_below(std::uint32_t end) const {
    return static_cast<std::uint32_t>((mixed(state_ + kStep) >> 32) * end >> 32);
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvtier::policy
