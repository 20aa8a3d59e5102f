// Memory for things of one size, which are found by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
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
    for (; chunks_.size() <= index >> kBits; ++num_chunks_)
      chunks_.push_back(allocate_pages<std::byte>(kRows * row_bytes_));
  }
  // Row `index` exists afterwards, and not all before it; new ones hold zeros.
  void reach_alone(std::uint32_t index) {
    if (chunks_.size() <= index >> kBits) chunks_.resize((index >> kBits) + 1);
    Pages<std::byte>& chunk = chunks_[index >> kBits];
    if (chunk) return;
    chunk = allocate_pages<std::byte>(kRows * row_bytes_);
    std::memset(chunk.get(), 0, kRows * row_bytes_);
    ++num_chunks_;
  }
  // Calls visit(index) for each row that exists.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk)
      for (std::size_t at = 0; chunks_[chunk] && at < kRows; ++at)
        visit(static_cast<std::uint32_t>(chunk << kBits | at));
  }

  std::size_t num_bytes() const { return num_chunks_ * kRows * row_bytes_; }

 private:
  static constexpr std::size_t kBits = 12;
  static constexpr std::size_t kRows = std::size_t{1} << kBits;

  std::byte* row(std::uint32_t index) const {
    return chunks_[index >> kBits].get() + (index & (kRows - 1)) * row_bytes_;
  }

  std::size_t row_bytes_;
  std::vector<Pages<std::byte>> chunks_;
  std::size_t num_chunks_ = 0;
};

}  // namespace kvtier
