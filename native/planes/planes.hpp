// Byte planes of floating-point numbers: exponents apart from the bits that look random.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::planes {

// An element is rotated left by one bit, so that its exponent is in its highest byte and its sign
// in the lowest bit. Elements are taken in tiles of `kTileElements`.
//
//   width 1 (fp8)     high: the upper four bits of elements k and k + tile / 2, in one byte
//                     low:  their lower four bits, in one byte
//   width 2, 4        low:  the other bytes, a plane of the tile each, the lowest first
//     base kWhole     high: the highest byte of each element
//     base 0 to 241   high: exponent - base of elements k and k + tile / 2, four bits each; 15 for
//                           an exponent outside of base to base + 14, which is in `escapes`
constexpr std::size_t kTileElements = 4096;
constexpr int kWhole = -1;
constexpr int kMaxBase = 241;
constexpr std::uint8_t kEscape = 15;

struct Plan {
  int width;  // 0: not at all
  int base;
};

// How the bytes are split so that the fewest bits remain, by a sample of them.
Plan choose(const std::byte* src, std::size_t num_bytes);

struct Split {
  std::size_t num_bytes;  // a multiple of 2 * width
  int width;              // 1, 2 or 4
  int base;               // kWhole, or 0 to kMaxBase; 0 for width 1
};

constexpr std::size_t high_bytes(const Split& split) {
  const std::size_t num = split.num_bytes / static_cast<std::size_t>(split.width);
  return split.base == kWhole ? num : num / 2;
}
constexpr std::size_t low_bytes(const Split& split) {
  const auto width = static_cast<std::size_t>(split.width);
  return width == 1 ? split.num_bytes / 2 : split.num_bytes / width * (width - 1);
}

// Splits bytes into planes. Returns the number of escapes, or -1 if there are more than
// `max_escapes`; the planes are incomplete then.
std::ptrdiff_t split(const std::byte* src, const Split& split, std::byte* high, std::byte* low,
                     std::byte* escapes, std::size_t max_escapes);

// Puts the bytes together again. Returns whether there were exactly `num_escapes` escapes.
bool join(std::byte* dst, const Split& split, const std::byte* high, const std::byte* low,
          const std::byte* escapes, std::size_t num_escapes);

}  // namespace kvtier::planes
