// Memory for labels that have no room beside their node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/pages.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

// The bytes of labels, in units of eight. Freed ones are used again for labels of the same length.
class LabelArena {
 public:
  std::uint32_t store(Label label);
  void free(std::uint32_t at, std::size_t num_bytes);
  const std::byte* data(std::uint32_t at) const {
    return chunks_[at >> kBits] + std::size_t{at & kMask} * kUnit;
  }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  static constexpr std::size_t kUnit = 8;
  static constexpr std::size_t kBits = 15;
  static constexpr std::uint32_t kMask = (std::uint32_t{1} << kBits) - 1;
  struct Freed {
    std::size_t num_units;
    std::vector<std::uint32_t> at;
  };

  static std::size_t units(std::size_t num_bytes) {
    return num_bytes == 0 ? 1 : (num_bytes + kUnit - 1) / kUnit;
  }
  Freed& freed(std::size_t num_units);
  std::uint32_t take(std::size_t num_units);

  std::vector<Pages<std::byte>> buffers_;
  std::vector<std::byte*> chunks_;  // a long label's buffer is several chunks
  std::size_t next_ = 0;            // the first unit that was never used
  std::size_t num_bytes_ = 0;
  std::vector<Freed> freed_;
};

}  // namespace kvtier::trie
