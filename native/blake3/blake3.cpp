#include "blake3/blake3.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

namespace kvtier::blake3 {

namespace {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kNumRounds = 7;
constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kRoot = 8;

using Words = std::array<std::uint32_t, 16>;
using Chaining = std::array<std::uint32_t, 8>;

constexpr Chaining kStart = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
constexpr std::array<std::uint8_t, 16> kPermuted = {2, 6,  3,  10, 7, 0,  4, 13,
                                                    1, 11, 12, 5,  9, 14, 15, 8};

// Which word of the message each place of each round takes.
constexpr auto kSchedule = [] {
  std::array<std::array<std::uint8_t, 16>, kNumRounds> schedule{};
  for (std::size_t i = 0; i < 16; ++i) schedule[0][i] = static_cast<std::uint8_t>(i);
  for (std::size_t round = 1; round < kNumRounds; ++round)
    for (std::size_t i = 0; i < 16; ++i)
      schedule[round][i] = schedule[round - 1][kPermuted[i]];
  return schedule;
}();

inline void mix(Words& v, std::size_t a, std::size_t b, std::size_t c, std::size_t d,
                std::uint32_t x, std::uint32_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 12);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 8);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 7);
}

template <std::size_t kRound>
inline void round(Words& v, const Words& m) {
  constexpr auto& s = kSchedule[kRound];
  mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
  mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
  mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
  mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
  mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
  mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
  mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
  mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
}

// Of the first chunk: its number, the counter, is 0.
void compress(Chaining& chaining, const Words& message, std::uint32_t num_bytes,
              std::uint32_t flags) {
  Words v{};
  std::copy(chaining.begin(), chaining.end(), v.begin());
  std::copy(kStart.begin(), kStart.begin() + 4, v.begin() + 8);
  v[14] = num_bytes;
  v[15] = flags;
  [&]<std::size_t... kRounds>(std::index_sequence<kRounds...>) {
    (round<kRounds>(v, message), ...);
  }(std::make_index_sequence<kNumRounds>());
  for (std::size_t i = 0; i < 8; ++i) chaining[i] = v[i] ^ v[i + 8];
}

std::uint32_t little_endian(std::uint32_t word) {
  if constexpr (std::endian::native == std::endian::big)
    return word << 24 | (word & 0xFF00) << 8 | (word >> 8 & 0xFF00) | word >> 24;
  return word;
}

}  // namespace

Hash hash(std::span<const std::byte> text) {
  Chaining chaining = kStart;
  std::uint32_t flags = kChunkStart;
  do {
    const std::size_t num = std::min(text.size(), kBlockBytes);
    Words message{};
    std::memcpy(message.data(), text.data(), num);
    for (std::uint32_t& word : message) word = little_endian(word);
    text = text.subspan(num);
    if (text.empty()) flags |= kChunkEnd | kRoot;
    compress(chaining, message, static_cast<std::uint32_t>(num), flags);
    flags = 0;
  } while (!text.empty());
  Hash result;
  for (std::uint32_t& word : chaining) word = little_endian(word);
  std::memcpy(result.data(), chaining.data(), kHashBytes);
  return result;
}

}  // namespace kvtier::blake3
