// Lists of fragments to copy, and walks over a part of such a list.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvtier::copy {

// Fragment i copies size[i] bytes from address src[i] to address dst[i]. Not owned.
struct Fragments {
  const std::uint64_t* dst;
  const std::uint64_t* src;
  const std::uint64_t* size;
  std::size_t num;
};

// A part of a list: `num_bytes` bytes, beginning `offset` bytes into fragment `first`. A fragment
// may be split between two parts.
struct Part {
  std::size_t first;
  std::size_t offset;
  std::size_t num_bytes;
};

// What one walk has in hand.
struct Span {
  std::byte* dst;
  const std::byte* src;
  std::size_t size;

  void drop_front(std::size_t num_bytes) {
    dst += num_bytes;
    src += num_bytes;
    size -= num_bytes;
  }
};

// Gives the spans of a part in order, empty ones left out.
class Walk {
 public:
  Walk(const Fragments& list, const Part& part)
      : list_(list), index_(part.first), offset_(part.offset), left_(part.num_bytes) {}

  bool next(Span& span) {
    while (left_ > 0) {
      const std::size_t size = std::min<std::size_t>(list_.size[index_] - offset_, left_);
      span.dst = reinterpret_cast<std::byte*>(list_.dst[index_]) + offset_;
      span.src = reinterpret_cast<const std::byte*>(list_.src[index_]) + offset_;
      span.size = size;
      left_ -= size;
      ++index_;
      offset_ = 0;
      if (size > 0) return true;
    }
    return false;
  }

  // Where the span after this one will be read; null at the end.
  const std::byte* peek() const {
    return left_ > 0 ? reinterpret_cast<const std::byte*>(list_.src[index_]) : nullptr;
  }

 private:
  const Fragments& list_;
  std::size_t index_;
  std::size_t offset_;
  std::size_t left_;
};

}  // namespace kvtier::copy
