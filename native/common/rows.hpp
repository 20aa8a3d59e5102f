// Memory for things of one size, which are found by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/pages.hpp"

namespace kvtier {

// Rows of one size. They grow in chunks: nothing moves, and no growth copies what is there.
class Rows {
 public:
  explicit Rows(std::size_t row_bytes) : row_bytes_(row_bytes) {}

  // What lies `offset` bytes into a row.
  template <typename Item>
  Item* at(std::uint32_t index, std::size_t offset) {
    return reinterpret_cast<Item*>(row(index) + offset);
  }
  template <typename Item>
  const Item* at(std::uint32_t index, std::size_t offset) const {
    return reinterpret_cast<const Item*>(row(index) + offset);
  }
  // Brings the first bytes of a row nearer.
  void prefetch(std::uint32_t index, std::size_t num_bytes) const {
    constexpr std::size_t kLine = 64;
    for (std::size_t at = 0; at < num_bytes; at += kLine) __builtin_prefetch(row(index) + at);
  }

  // Rows 0 .. index exist afterwards; new ones hold nothing defined.
  void reach(std::uint32_t index) {
    while (chunks_.size() <= index >> kBits)
      chunks_.push_back(allocate_pages<std::byte>(kRows * row_bytes_));
  }

  std::size_t num_bytes() const { return chunks_.size() * kRows * row_bytes_; }

 private:
  static constexpr std::size_t kBits = 12;
  static constexpr std::size_t kRows = std::size_t{1} << kBits;

  std::byte* row(std::uint32_t index) const {
    return chunks_[index >> kBits].get() + (index & (kRows - 1)) * row_bytes_;
  }

  std::size_t row_bytes_;
  std::vector<Pages<std::byte>> chunks_;
};

}  // namespace kvtier
