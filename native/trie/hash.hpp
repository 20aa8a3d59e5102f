// Hashes of labels. They only select a place in the table: labels are compared in full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "trie/types.hpp"

namespace kvtier::trie {

namespace detail {

__extension__ using Wide = unsigned __int128;

// Both halves of a 64 x 64 bit product, folded: every bit of the input reaches every bit of the
// result.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

template <typename Number = std::uint64_t>
std::uint64_t word(const std::byte* at) {
  Number value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Fewer than 8 bytes. Loads of fixed size overlap, since a copy of variable size is slow.
inline std::uint64_t last_word(const std::byte* at, std::size_t num_bytes) {
  if (num_bytes >= 4)
    return word<std::uint32_t>(at) | word<std::uint32_t>(at + num_bytes - 4) << 8 * (num_bytes - 4);
  const auto byte = [at](std::size_t i) { return std::to_integer<std::uint64_t>(at[i]) << 8 * i; };
  return byte(0) | byte(num_bytes / 2) | byte(num_bytes - 1);
}

}  // namespace detail

// Hash of the prefix that ends with `label`, from the hash of the prefix before it. It starts from
// the trie's secret seed, so that a client cannot send prompts whose hashes collide.
inline std::uint64_t prefix_hash(std::uint64_t before, Label label) {
  constexpr std::uint64_t kOdd[] = {0x9E37'79B9'7F4A'7C15, 0xC2B2'AE3D'27D4'EB4F,
                                    0xD6E8'FEB8'6659'FD93, 0xA076'1D64'78BD'642F};
  std::uint64_t even = before ^ kOdd[0];
  std::uint64_t odd = before ^ kOdd[1];
  const std::byte* at = label.data;
  std::size_t left = label.size;
  for (; left >= 32; left -= 32, at += 32) {
    even = detail::fold(detail::word(at) ^ even, detail::word(at + 8) ^ kOdd[2]);
    odd = detail::fold(detail::word(at + 16) ^ odd, detail::word(at + 24) ^ kOdd[3]);
  }
  for (; left >= 8; left -= 8, at += 8) even = detail::fold(detail::word(at) ^ even, kOdd[2]);
  if (left > 0) even = detail::fold(detail::last_word(at, left) ^ even, kOdd[2]);
  return detail::fold(even ^ kOdd[3], odd ^ label.size ^ kOdd[0]);
}

}  // namespace kvtier::trie
