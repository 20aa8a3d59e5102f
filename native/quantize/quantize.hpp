// Numbers as codes of one byte, with a scale per channel.
#pragma once

#include <cstddef>

namespace kvtier::quantize {

enum class Type { float32, float16, bfloat16 };
enum class Code { e4m3, int8 };

constexpr std::size_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

// The KV of some tokens in one layer: [num_tokens, num_channels].
//
// A scale is a bfloat16: the channel's largest magnitude by the largest code, rounded up. A code is
// the number by its scale, rounded to nearest, ties to even: e4m3 (OCP 8-bit floating point,
// revision 1.0), or -127 to 127.
struct Shape {
  std::size_t num_tokens;
  std::size_t num_channels;
  Type type;
  Code code;
};

// Writes scales [num_channels] and codes [num_tokens, num_channels]. Returns false, and leaves both
// undefined, if there is an infinity or a NaN.
bool encode(const std::byte* src, const Shape& shape, std::byte* scales, std::byte* codes);

// Writes code * scale, at most the largest finite number of the type, rounded to it: to nearest,
// ties to even. Returns false, and leaves `dst` undefined, for a code or a scale that `encode` does
// not write.
bool decode(std::byte* dst, const Shape& shape, const std::byte* scales, const std::byte* codes);

}  // namespace kvtier::quantize
