// Memory for items of one size, found by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "common/pages.hpp"

namespace kvtier {

// Rows of one size. They grow in chunks, so rows never move and growth copies nothing. They are
// excluded from core dumps, since they may contain token ids.
class Rows {
 public:
  explicit Rows(std::size_t row_bytes) : row_bytes_(row_bytes) {}

  // Allocate chunks for about `num` rows, in huge pages if the system has some, so that a random
  // access waits only for the row's memory, and not for page tables as well. Call it before the
  // first row and the first request; later it does nothing.
  void reserve(std::size_t num) {
    const std::size_t num_bytes = (num + kRows - 1) / kRows * chunk_bytes();
    if (num_bytes < kFewestReserved || num_reserved_ > 0 || !chunks_.empty()) return;
    reserved_ = zeroed_pages<std::byte>(num_bytes);
    leave_out_of_dumps(reserved_.get(), num_bytes);
    num_reserved_ = num_bytes;
  }
  // Set the size of rows, before the first one. Reserved chunks stay.
  void set_row_bytes(std::size_t num_bytes) { row_bytes_ = num_bytes; }

  // Return the item `offset` bytes into a row.
  template <typename Item>
  Item* at(std::uint32_t index, std::size_t offset) {
    return reinterpret_cast<Item*>(row(index) + offset);
  }
  template <typename Item>
  const Item* at(std::uint32_t index, std::size_t offset) const {
    return reinterpret_cast<const Item*>(row(index) + offset);
  }
  // Prefetch the first bytes of a row, which may begin anywhere in a line.
  void prefetch(std::uint32_t index, std::size_t num_bytes) const {
    constexpr std::size_t kLine = 64;
    for (std::size_t at = 0; at < num_bytes; at += kLine) __builtin_prefetch(row(index) + at);
    __builtin_prefetch(row(index) + num_bytes - 1);
  }

  // Make rows 0 .. index exist; new ones are uninitialised.
  void reach(std::uint32_t index) {
    while (chunks_.size() <= index >> kBits) chunks_.push_back(next_chunk());
  }
  // Make row `index` exist, but not all rows before it; new ones are zeros.
  void reach_alone(std::uint32_t index) {
    if (chunks_.size() <= index >> kBits) chunks_.resize((index >> kBits) + 1);
    std::byte*& chunk = chunks_[index >> kBits];
    if (chunk != nullptr) return;
    const std::size_t num_given = num_given_;
    chunk = next_chunk();
    if (num_given == num_given_) std::memset(chunk, 0, chunk_bytes());  // not one of the reserved
  }
  // Calls visit(index) for each row that exists.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk)
      for (std::size_t at = 0; chunks_[chunk] && at < kRows; ++at)
        visit(static_cast<std::uint32_t>(chunk << kBits | at));
  }

  std::size_t num_bytes() const { return num_reserved_ + grown_.size() * chunk_bytes(); }

 private:
  static constexpr std::size_t kBits = 12;
  static constexpr std::size_t kRows = std::size_t{1} << kBits;
  static constexpr std::size_t kFewestReserved = std::size_t{2} << 20;  // bytes: a huge page

  std::size_t chunk_bytes() const { return kRows * row_bytes_; }
  std::byte* row(std::uint32_t index) const {
    return chunks_[index >> kBits] + (index & (kRows - 1)) * row_bytes_;
  }
  std::byte* next_chunk() {
    const std::size_t at = num_given_;
    if (at + chunk_bytes() <= num_reserved_) {
      num_given_ += chunk_bytes();
      return reserved_.get() + at;
    }
    grown_.push_back(allocate_pages<std::byte>(chunk_bytes()));
    leave_out_of_dumps(grown_.back().get(), chunk_bytes());
    return grown_.back().get();
  }

  std::size_t row_bytes_;
  std::vector<std::byte*> chunks_;
  std::vector<Pages<std::byte>> grown_;  // chunks that were not reserved
  std::shared_ptr<std::byte[]> reserved_;
  std::size_t num_reserved_ = 0;  // bytes
  std::size_t num_given_ = 0;     // bytes: of those reserved, as chunks
};

}  // namespace kvtier
