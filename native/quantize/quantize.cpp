#include "quantize/quantize.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#define KVTIER_AVX2 1
#endif

namespace kvtier::quantize {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr std::uint32_t kInfinity = 0x7F800000;
constexpr float kLargestBfloat16 = std::bit_cast<float>(std::uint32_t{0x7F7F0000});
constexpr float kLargestE4m3 = 448, kLargestInt8 = 127;
constexpr float kRounds = 12582912;  // 1.5 * 2**23: floats of this size are integers
constexpr int kHalfBias = 15, kFloatBias = 127, kE4m3Bias = 7;
constexpr int kHalfShift = 13, kE4m3Shift = 20;  // of mantissas, from those of float
constexpr std::uint32_t kSmallestHalf = (kFloatBias - kHalfBias + 1) << 23;  // normal ones
constexpr std::uint32_t kSmallestE4m3 = (kFloatBias - kE4m3Bias + 1) << 23;
constexpr std::uint8_t kNanE4m3 = 0x7F, kNoInt8 = 0x80;

float number(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// Returns `bits` without the lowest `shift` bits, rounded to nearest, ties to even.
std::uint32_t rounded(std::uint32_t bits, int shift) {
  return (bits + ((std::uint32_t{1} << (shift - 1)) - 1) + (bits >> shift & 1)) >> shift;
}

// Without a branch, so that compilers vectorise it.
std::uint32_t select(bool first, std::uint32_t one, std::uint32_t other) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(first);
  return (one & mask) | (other & ~mask);
}

// At most `largest` in either direction. value: no NaN.
float limited(float value, float largest) {
  const std::uint32_t bits = bits_of(value);
  return number(std::min(bits & kMagnitude, bits_of(largest)) | (bits & ~kMagnitude));
}

// Rounds to nearest, ties to even. value: -2**22 to 2**22.
std::int32_t to_integer(float value) { return static_cast<std::int32_t>(value + kRounds - kRounds); }

// -- types
// ---------------------------------------------------------------------------------------------

struct Float32 {
  using HintKind = std::uint32_t;
  static constexpr float kLargest = std::numeric_limits<float>::max();
  static float read(HintKind word) { return number(word); }
  static HintKind written(float value) { return bits_of(value); }
};

struct Bfloat16 {
  using HintKind = std::uint16_t;
  static constexpr float kLargest = kLargestBfloat16;
  static float read(HintKind word) { return number(std::uint32_t{word} << 16); }
  static HintKind written(float value) { return static_cast<HintKind>(rounded(bits_of(value), 16)); }
};

struct Float16 {
  using HintKind = std::uint16_t;
  static constexpr float kLargest = 65504;
  static float read(HintKind word) {
    const std::uint32_t exponent = word >> 10 & 31, mantissa = word & 1023U;
    const std::uint32_t bias = select(exponent == 31, 255 - 31, kFloatBias - kHalfBias);
    const std::uint32_t normal = (exponent + bias) << 23 | mantissa << kHalfShift;
    const std::uint32_t small = bits_of(static_cast<float>(static_cast<std::int32_t>(mantissa)) * 0x1p-24F);
    const std::uint32_t sign = (word & 0x8000U) << 16;
    return number(select(exponent == 0, small, normal) | sign);
  }
  static HintKind written(float value) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & kMagnitude;
    const std::uint32_t normal =
        rounded(magnitude - ((kFloatBias - kHalfBias) << 23), kHalfShift);
    const float steps = limited(number(magnitude) * 0x1p24F, 1024);
    const auto small = static_cast<std::uint32_t>(to_integer(steps));
    const std::uint32_t sign = bits >> 16 & 0x8000;
    return static_cast<HintKind>(select(magnitude < kSmallestHalf, small, normal) | sign);
  }
};

// -- codes
// ---------------------------------------------------------------------------------------------

struct E4m3 {
  static constexpr float kLargest = kLargestE4m3;
  static std::uint8_t of(float value) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & kMagnitude;
    const std::uint32_t normal = rounded(magnitude, kE4m3Shift) - ((kFloatBias - kE4m3Bias) << 3);
    // Below the smallest normal number codes are multiples of 2**-9.
    const float steps = limited(number(magnitude) * 0x1p9F, 8);
    const auto small = static_cast<std::uint32_t>(to_integer(steps));
    const std::uint32_t sign = bits >> 24 & 0x80;
    return static_cast<std::uint8_t>(select(magnitude < kSmallestE4m3, small, normal) | sign);
  }
  static float value(std::uint8_t code) {
    const std::uint32_t magnitude = code & 0x7FU;
    const std::uint32_t normal = (magnitude << kE4m3Shift) + ((kFloatBias - kE4m3Bias) << 23);
    const std::uint32_t small = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9F);
    return number(select(magnitude < 8, small, normal) | (code & 0x80U) << 24);
  }
  static bool is_never_written(std::uint8_t code) { return (code & kNanE4m3) == kNanE4m3; }
};

struct Int8 {
  static constexpr float kLargest = kLargestInt8;
  static std::uint8_t of(float value) {
    return static_cast<std::uint8_t>(to_integer(value));
  }
  static float value(std::uint8_t code) { return static_cast<std::int8_t>(code); }
  static bool is_never_written(std::uint8_t code) { return code == kNoInt8; }
};

// -- blocks
// ---------------------------------------------------------------------------------------------

template <typename HintKind>
HintKind load(const std::byte* from, std::size_t at) {
  HintKind word;
  std::memcpy(&word, from + at * sizeof(HintKind), sizeof(HintKind));
  return word;
}

template <typename HintKind>
void store(std::byte* to, std::size_t at, HintKind word) {
  std::memcpy(to + at * sizeof(HintKind), &word, sizeof(HintKind));
}

// Compilers vectorise these loops. They are inlined into one function per instruction set.

template <typename Number, typename Codes>
[[gnu::always_inline]] inline bool encode_as(const std::byte* src, const Shape& shape,
                                             std::byte* scales, std::byte* codes,
                                             std::uint32_t* largest, float* divisors) {
  using HintKind = typename Number::HintKind;
  const std::size_t num = shape.num_channels;
  std::fill_n(largest, num, 0);
  for (std::size_t token = 0; token < shape.num_tokens; ++token)
    for (std::size_t k = 0; k < num; ++k) {
      const float value = Number::read(load<HintKind>(src, token * num + k));
      largest[k] = std::max(largest[k], bits_of(value) & kMagnitude);
    }
  std::uint32_t most = 0;
  for (std::size_t k = 0; k < num; ++k) most = std::max(most, largest[k]);
  if (most >= kInfinity) return false;
  for (std::size_t k = 0; k < num; ++k) {
    const std::uint32_t scale = (bits_of(number(largest[k]) / Codes::kLargest) + 0xFFFF) >> 16;
    const auto its = static_cast<std::uint16_t>(std::max<std::uint32_t>(scale, largest[k] > 0));
    store(scales, k, its);
    divisors[k] = its == 0 ? 1.0F : Bfloat16::read(its);
  }
  for (std::size_t token = 0; token < shape.num_tokens; ++token)
    for (std::size_t k = 0; k < num; ++k) {
      const std::size_t at = token * num + k;
      const float value = Number::read(load<HintKind>(src, at)) / divisors[k];
      codes[at] = static_cast<std::byte>(Codes::of(value));
    }
  return true;
}

template <typename Number, typename Codes>
[[gnu::always_inline]] inline bool decode_as(std::byte* dst, const Shape& shape,
                                             const std::byte* scales, const std::byte* codes,
                                             float* factors) {
  using HintKind = typename Number::HintKind;
  const std::size_t num = shape.num_channels;
  std::uint32_t most = 0;
  for (std::size_t k = 0; k < num; ++k) {
    factors[k] = Bfloat16::read(load<std::uint16_t>(scales, k));
    most = std::max(most, bits_of(factors[k]) & kMagnitude);
  }
  std::uint8_t wrong = 0;
  for (std::size_t at = 0; at < shape.num_tokens * num; ++at)
    wrong |= Codes::is_never_written(static_cast<std::uint8_t>(codes[at]));
  if (most >= kInfinity || wrong != 0) return false;
  for (std::size_t token = 0; token < shape.num_tokens; ++token)
    for (std::size_t k = 0; k < num; ++k) {
      const std::size_t at = token * num + k;
      const float value = Codes::value(static_cast<std::uint8_t>(codes[at])) * factors[k];
      store<HintKind>(dst, at, Number::written(limited(value, Number::kLargest)));
    }
  return true;
}

struct Encode {
  const std::byte* src;
  const Shape& shape;
  std::byte* scales;
  std::byte* codes;
  std::uint32_t* largest;
  float* divisors;

  template <typename Number, typename Codes>
  [[gnu::always_inline]] bool as() const {
    return encode_as<Number, Codes>(src, shape, scales, codes, largest, divisors);
  }
};

struct Decode {
  std::byte* dst;
  const Shape& shape;
  const std::byte* scales;
  const std::byte* codes;
  float* factors;

  template <typename Number, typename Codes>
  [[gnu::always_inline]] bool as() const {
    return decode_as<Number, Codes>(dst, shape, scales, codes, factors);
  }
};

template <typename Number, typename Work>
[[gnu::always_inline]] inline bool with_codes(const Work& work) {
  return work.shape.code == Code::e4m3 ? work.template as<Number, E4m3>()
                                       : work.template as<Number, Int8>();
}

template <typename Work>
[[gnu::always_inline]] inline bool run(const Work& work) {
  switch (work.shape.type) {
    case Type::float32: return with_codes<Float32>(work);
    case Type::float16: return with_codes<Float16>(work);
    default: return with_codes<Bfloat16>(work);
  }
}

bool run_plain(const Encode& work) { return run(work); }
bool run_plain(const Decode& work) { return run(work); }

#if KVTIER_AVX2
[[gnu::target("avx2")]] bool run_avx2(const Encode& work) { return run(work); }
[[gnu::target("avx2")]] bool run_avx2(const Decode& work) { return run(work); }
#endif

template <typename Work>
bool run_best(const Work& work) {
#if KVTIER_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return run_avx2(work);
#endif
  return run_plain(work);
}

}  // namespace

bool encode(const std::byte* src, const Shape& shape, std::byte* scales, std::byte* codes) {
  std::vector<std::uint32_t> largest(shape.num_channels);
  std::vector<float> divisors(shape.num_channels);
  return run_best(Encode{src, shape, scales, codes, largest.data(), divisors.data()});
}

bool decode(std::byte* dst, const Shape& shape, const std::byte* scales, const std::byte* codes) {
  std::vector<float> factors(shape.num_channels);
  return run_best(Decode{dst, shape, scales, codes, factors.data()});
}

}  // namespace kvtier::quantize
