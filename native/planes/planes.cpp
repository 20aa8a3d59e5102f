#include "planes/planes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#define KVTIER_AVX2 1
#endif

namespace kvtier::planes {
namespace {

constexpr std::size_t kSampleRuns = 16;
constexpr std::size_t kRunBytes = 128;
constexpr double kLeastGain = 0.98;    // of the bits, to split at all
constexpr double kPairedShare = 0.97;  // of the exponents in the window, to write four bits each
constexpr std::size_t kGroup = 64;     // bytes that are looked through for an escape at a time
constexpr std::uint64_t kOnes = 0x0101010101010101;
constexpr std::uint64_t kGather = 0x0102040810204080;  // bit 0 of byte k goes to bit 56 + k
constexpr std::size_t kKnownCounts = kSampleRuns * kRunBytes + 1;

using Counts = std::array<std::uint32_t, 256>;
using Bytes = std::uint8_t*;
using Source = const std::uint8_t*;

template <typename Word>
Word load(Source at) {
  Word word;
  std::memcpy(&word, at, sizeof(Word));
  return word;
}

double count_log(std::size_t count) {
  return count == 0 ? 0 : static_cast<double>(count) * std::log2(static_cast<double>(count));
}

double bits_of(const Counts& counts, std::size_t num) {
  static const auto known = [] {
    std::array<double, kKnownCounts> made{};
    for (std::size_t count = 0; count < kKnownCounts; ++count) made[count] = count_log(count);
    return made;
  }();
  double bits = count_log(num);
  for (const std::uint32_t count : counts)
    bits -= count < kKnownCounts ? known[count] : count_log(count);
  return bits / static_cast<double>(num);
}

template <typename Word>
void count_high(Source src, std::size_t num_bytes, Counts& counts) {
  for (std::size_t at = 0; at + sizeof(Word) <= num_bytes; at += sizeof(Word)) {
    const Word word = std::rotl(load<Word>(src + at), 1);
    ++counts[static_cast<std::size_t>(word >> (8 * sizeof(Word) - 8))];
  }
}

// The window of 15 exponents that has the most of them; kWhole if it lacks too many.
int window(const Counts& counts, std::size_t num) {
  std::uint32_t inside = 0, most = 0;
  int best = 0;
  for (int end = 0; end < 256; ++end) {
    inside += counts[static_cast<std::size_t>(end)];
    if (end >= kEscape) inside -= counts[static_cast<std::size_t>(end - kEscape)];
    if (const int base = end - kEscape + 1; base >= 0 && inside > most) {
      most = inside;
      best = base;
    }
  }
  return most >= kPairedShare * static_cast<double>(num) ? best : kWhole;
}

// The loops below are over arrays of fixed kinds, without branches: compilers vectorise them. They
// are inlined into one function per instruction set.

template <typename Word>
[[gnu::always_inline]] inline void take_apart(Source src, std::size_t num, Bytes exponents,
                                               Bytes low) {
  for (std::size_t k = 0; k < num; ++k) {
    const Word word = std::rotl(load<Word>(src + k * sizeof(Word)), 1);
    exponents[k] = static_cast<std::uint8_t>(word >> (8 * sizeof(Word) - 8));
    for (std::size_t plane = 0; plane + 1 < sizeof(Word); ++plane)
      low[plane * num + k] = static_cast<std::uint8_t>(word >> (8 * plane));
  }
}

template <typename Word>
[[gnu::always_inline]] inline void put_together(Bytes dst, std::size_t num, Source numbers,
                                                 std::uint8_t base, Source low) {
  for (std::size_t k = 0; k < num; ++k) {
    const auto exponent = static_cast<std::uint8_t>(numbers[k] + base);
    if constexpr (sizeof(Word) == 2) {  // by bytes: compilers make less of it than of words
      dst[2 * k] = static_cast<std::uint8_t>((low[k] >> 1) | (exponent << 7));
      dst[2 * k + 1] = static_cast<std::uint8_t>((exponent >> 1) | (low[k] << 7));
      continue;
    }
    Word word = static_cast<Word>(static_cast<Word>(exponent) << (8 * sizeof(Word) - 8));
    for (std::size_t plane = 0; plane + 1 < sizeof(Word); ++plane)
      word = static_cast<Word>(word | static_cast<Word>(static_cast<Word>(low[plane * num + k])
                                                        << (8 * plane)));
    word = std::rotr(word, 1);
    std::memcpy(dst + k * sizeof(Word), &word, sizeof(Word));
  }
}

[[gnu::always_inline]] inline void split_nibbles(Source src, std::size_t num, Bytes high,
                                                  Bytes low) {
  const std::size_t half = num / 2;
  for (std::size_t k = 0; k < half; ++k) {
    const std::uint8_t a = std::rotl(src[k], 1), b = std::rotl(src[k + half], 1);
    high[k] = static_cast<std::uint8_t>((a >> 4) | (b & 0xF0));
    low[k] = static_cast<std::uint8_t>((a & 0x0F) | (b << 4));
  }
}

[[gnu::always_inline]] inline void join_nibbles(Bytes dst, std::size_t num, Source high,
                                                 Source low) {
  const std::size_t half = num / 2;
  for (std::size_t k = 0; k < half; ++k) {
    const auto a = static_cast<std::uint8_t>((high[k] << 4) | (low[k] & 0x0F));
    const auto b = static_cast<std::uint8_t>((high[k] & 0xF0) | (low[k] >> 4));
    dst[k] = std::rotr(a, 1);
    dst[k + half] = std::rotr(b, 1);
  }
}

// Exponents as numbers in the window, in place; returns the largest.
[[gnu::always_inline]] inline std::uint8_t into_window(Bytes exponents, std::size_t num,
                                                        std::uint8_t base) {
  std::uint8_t most = 0;
  for (std::size_t k = 0; k < num; ++k) {
    const auto shifted = static_cast<std::uint8_t>(exponents[k] - base);
    exponents[k] = std::min(shifted, kEscape);
    most = std::max(most, exponents[k]);
  }
  return most;
}

// Calls found(k) for every escape, in order. numbers: four bits each.
template <typename Found>
[[gnu::always_inline]] inline void each_escape(Source numbers, std::size_t num,
                                                const Found& found) {
  std::size_t first = 0;
  for (; first + kGroup <= num; first += kGroup) {
    std::uint64_t words = 0;  // a byte of 15 and one more has its fifth bit set
    for (std::size_t k = first; k < first + kGroup; k += sizeof(words))
      words |= load<std::uint64_t>(numbers + k) + kOnes;
    if ((words & (kOnes << 4)) == 0) continue;
    std::uint64_t mask = 0;  // a bit for each byte
    for (std::size_t k = 0; k < kGroup; k += sizeof(words)) {
      const std::uint64_t some = (load<std::uint64_t>(numbers + first + k) + kOnes) >> 4 & kOnes;
      mask |= (some * kGather >> 56) << k;
    }
    for (; mask != 0; mask &= mask - 1)
      found(first + static_cast<std::size_t>(std::countr_zero(mask)));
  }
  for (; first < num; ++first)
    if (numbers[first] == kEscape) found(first);
}

class Escapes {
 public:
  Escapes(Bytes to, std::size_t room) : to_(to), room_(room) {}

  void add(std::uint8_t exponent) {
    if (num_ < room_) to_[num_] = exponent;
    ++num_;
  }
  std::ptrdiff_t num() const { return num_ <= room_ ? static_cast<std::ptrdiff_t>(num_) : -1; }

 private:
  Bytes to_;
  std::size_t room_;
  std::size_t num_ = 0;
};

template <typename Word>
[[gnu::always_inline]] inline std::ptrdiff_t split_words(Source src, const Split& split, Bytes high,
                                                          Bytes low, Escapes escapes) {
  std::array<std::uint8_t, kTileElements> numbers;
  const std::size_t num = split.num_bytes / sizeof(Word);
  for (std::size_t first = 0; first < num && escapes.num() >= 0; first += kTileElements) {
    const std::size_t some = std::min(num - first, kTileElements), half = some / 2;
    const Source tile = src + first * sizeof(Word);
    Bytes rest = low + first * (sizeof(Word) - 1);
    if (split.base == kWhole) {
      take_apart<Word>(tile, some, high + first, rest);
      continue;
    }
    take_apart<Word>(tile, some, numbers.data(), rest);
    if (into_window(numbers.data(), some, static_cast<std::uint8_t>(split.base)) == kEscape)
      each_escape(numbers.data(), some, [&](std::size_t k) {
        const Word word = std::rotl(load<Word>(tile + k * sizeof(Word)), 1);
        escapes.add(static_cast<std::uint8_t>(word >> (8 * sizeof(Word) - 8)));
      });
    Bytes pairs = high + first / 2;
    for (std::size_t k = 0; k < half; ++k)
      pairs[k] = static_cast<std::uint8_t>(numbers[k] | (numbers[k + half] << 4));
  }
  return escapes.num();
}

template <typename Word>
[[gnu::always_inline]] inline bool join_words(Bytes dst, const Split& split, Source high,
                                               Source low, Source escapes,
                                               std::size_t num_escapes) {
  std::array<std::uint8_t, kTileElements> numbers;
  const std::size_t num = split.num_bytes / sizeof(Word);
  const auto base = static_cast<std::uint8_t>(split.base == kWhole ? 0 : split.base);
  std::size_t used = 0;
  for (std::size_t first = 0; first < num; first += kTileElements) {
    const std::size_t some = std::min(num - first, kTileElements), half = some / 2;
    Source from = high + first;
    if (split.base != kWhole) {
      const Source pairs = high + first / 2;
      std::uint8_t most = 0;
      for (std::size_t k = 0; k < half; ++k) {
        const auto a = static_cast<std::uint8_t>(pairs[k] & 0x0F);
        const auto b = static_cast<std::uint8_t>(pairs[k] >> 4);
        numbers[k] = a;
        numbers[k + half] = b;
        most = std::max(most, std::max(a, b));
      }
      if (most == kEscape)
        each_escape(numbers.data(), some, [&](std::size_t k) {
          if (used < num_escapes) numbers[k] = static_cast<std::uint8_t>(escapes[used] - base);
          ++used;
        });
      from = numbers.data();
    }
    put_together<Word>(dst + first * sizeof(Word), some, from, base,
                       low + first * (sizeof(Word) - 1));
  }
  return used == num_escapes;
}

[[gnu::always_inline]] inline std::ptrdiff_t split_any(Source src, const Split& split, Bytes high,
                                                       Bytes low, const Escapes& found) {
  if (split.width == 2) return split_words<std::uint16_t>(src, split, high, low, found);
  if (split.width == 4) return split_words<std::uint32_t>(src, split, high, low, found);
  for (std::size_t first = 0; first < split.num_bytes; first += kTileElements)
    split_nibbles(src + first, std::min(split.num_bytes - first, kTileElements), high + first / 2,
                  low + first / 2);
  return 0;
}

[[gnu::always_inline]] inline bool join_any(Bytes dst, const Split& split, Source high, Source low,
                                            Source escapes, std::size_t num_escapes) {
  if (split.width == 2)
    return join_words<std::uint16_t>(dst, split, high, low, escapes, num_escapes);
  if (split.width == 4)
    return join_words<std::uint32_t>(dst, split, high, low, escapes, num_escapes);
  for (std::size_t first = 0; first < split.num_bytes; first += kTileElements)
    join_nibbles(dst + first, std::min(split.num_bytes - first, kTileElements), high + first / 2,
                 low + first / 2);
  return num_escapes == 0;
}

std::ptrdiff_t split_plain(Source src, const Split& split, Bytes high, Bytes low,
                              const Escapes& found) {
  return split_any(src, split, high, low, found);
}
bool join_plain(Bytes dst, const Split& split, Source high, Source low, Source escapes,
                   std::size_t num_escapes) {
  return join_any(dst, split, high, low, escapes, num_escapes);
}

#if KVTIER_AVX2
[[gnu::target("avx2")]] std::ptrdiff_t split_avx2(Source src, const Split& split, Bytes high,
                                                  Bytes low, const Escapes& found) {
  return split_any(src, split, high, low, found);
}
[[gnu::target("avx2")]] bool join_avx2(Bytes dst, const Split& split, Source high, Source low,
                                       Source escapes, std::size_t num_escapes) {
  return join_any(dst, split, high, low, escapes, num_escapes);
}

#endif

auto* best_split() {
#if KVTIER_AVX2
  if (__builtin_cpu_supports("avx2")) return split_avx2;
#endif
  return split_plain;
}

auto* best_join() {
#if KVTIER_AVX2
  if (__builtin_cpu_supports("avx2")) return join_avx2;
#endif
  return join_plain;
}

Source bytes_of(const std::byte* at) { return reinterpret_cast<Source>(at); }
Bytes bytes_of(std::byte* at) { return reinterpret_cast<Bytes>(at); }

}  // namespace

Plan choose(const std::byte* src, std::size_t num_bytes) {
  Counts ones{}, twos{}, fours{};
  const Source from = bytes_of(src);
  const std::size_t step = num_bytes / kSampleRuns / 8 * 8;
  std::size_t num = 0;
  for (std::size_t run = 0; run < kSampleRuns && step >= kRunBytes; ++run, num += kRunBytes) {
    const Source at = from + run * step;
    for (std::size_t k = 0; k < kRunBytes; ++k) ++ones[std::rotl(at[k], 1) >> 4];
    count_high<std::uint16_t>(at, kRunBytes, twos);
    count_high<std::uint32_t>(at, kRunBytes, fours);
  }
  if (num == 0) {
    num = num_bytes / 4 * 4;
    if (num == 0) return {0, 0};
    for (std::size_t k = 0; k < num; ++k) ++ones[std::rotl(from[k], 1) >> 4];
    count_high<std::uint16_t>(from, num, twos);
    count_high<std::uint32_t>(from, num, fours);
  }
  const double one = (4 + bits_of(ones, num)) / 8;
  const double two = (8 + bits_of(twos, num / 2)) / 16;
  const double four = (24 + bits_of(fours, num / 4)) / 32;
  if (std::min({one, two, four}) > kLeastGain) return {0, 0};
  if (one <= two && one <= four) return {1, 0};
  if (two <= four) return {2, window(twos, num / 2)};
  return {4, window(fours, num / 4)};
}

std::ptrdiff_t split(const std::byte* src, const Split& split, std::byte* high, std::byte* low,
                     std::byte* escapes, std::size_t max_escapes) {
  static auto* const best = best_split();
  return best(bytes_of(src), split, bytes_of(high), bytes_of(low),
             Escapes(bytes_of(escapes), max_escapes));
}

bool join(std::byte* dst, const Split& split, const std::byte* high, const std::byte* low,
          const std::byte* escapes, std::size_t num_escapes) {
  static auto* const best = best_join();
  return best(bytes_of(dst), split, bytes_of(high), bytes_of(low), bytes_of(escapes), num_escapes);
}

}  // namespace kvtier::planes
