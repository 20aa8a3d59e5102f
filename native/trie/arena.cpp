#include "trie/arena.hpp"

#include <cstring>
#include <stdexcept>

namespace kvtier::trie {

std::uint32_t LabelArena::store(Label label) {
  const std::uint32_t at = take(units(label.size));
  if (label.size > 0)
    std::memcpy(chunks_[at >> kBits] + (at & kMask) * kUnit, label.data, label.size);
  return at;
}

void LabelArena::free(std::uint32_t at, std::size_t num_bytes) {
  freed(units(num_bytes)).at.push_back(at);
}

// Few lengths occur: that of a block's label, and that of a chunk's.
LabelArena::Freed& LabelArena::freed(std::size_t num_units) {
  for (Freed& each : freed_)
    if (each.num_units == num_units) return each;
  return freed_.emplace_back(Freed{num_units, {}});
}

std::uint32_t LabelArena::take(std::size_t num_units) {
  Freed& same = freed(num_units);
  if (!same.at.empty()) {
    const std::uint32_t at = same.at.back();
    same.at.pop_back();
    return at;
  }
  constexpr std::size_t kUnits = std::size_t{1} << kBits;
  if (next_ + num_units > chunks_.size() * kUnits) {
    const std::size_t num_chunks = (num_units + kUnits - 1) / kUnits;
    next_ = chunks_.size() * kUnits;
    if (next_ + num_chunks * kUnits > std::size_t{1} << 32)
      throw std::length_error("the index holds 32 GiB of labels");
    const std::size_t num_bytes = num_chunks * kUnits * kUnit;
    buffers_.push_back(allocate_pages<std::byte>(num_bytes));
    leave_out_of_dumps(buffers_.back().get(), num_bytes);
    num_bytes_ += num_bytes;
    for (std::size_t chunk = 0; chunk < num_chunks; ++chunk)
      chunks_.push_back(buffers_.back().get() + chunk * kUnits * kUnit);
  }
  const std::size_t at = next_;
  next_ += num_units;
  return static_cast<std::uint32_t>(at);
}

}  // namespace kvtier::trie
