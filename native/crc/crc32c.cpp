#include "crc/crc32c.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "common/worker_pool.hpp"
#include "crc/polynomial.hpp"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define KVTIER_CRC_SSE42 1
#elif defined(__GNUC__) && defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define KVTIER_CRC_ARMV8 1
#endif

namespace kvtier::crc {
namespace {

std::uint64_t load_u64(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  if constexpr (std::endian::native == std::endian::big) {
    std::uint64_t swapped = 0;
    for (int i = 0; i < 8; ++i) swapped |= ((word >> (8 * i)) & 0xFF) << (56 - 8 * i);
    word = swapped;
  }
  return word;
}

// Below, a state is the inverted checksum; these go from one state to the next. `ahead` is what
// will be read next where that does not follow.
using Update = std::uint32_t (*)(std::uint32_t state, const std::byte* data, std::size_t num_bytes,
                                 const std::byte* ahead);

std::uint32_t update_table(std::uint32_t state, const std::byte* data, std::size_t num_bytes,
                           const std::byte*) {
  for (; num_bytes >= 8; data += 8, num_bytes -= 8) {
    const std::uint64_t word = load_u64(data) ^ state;
    state = 0;
    for (std::size_t i = 0; i < 8; ++i) state ^= kSteps[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; num_bytes > 0; ++data, --num_bytes)
    state = (state >> 8) ^ kSteps[0][(state ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
  return state;
}

// The instruction takes 8 bytes and three cycles, and the processor can begin one per cycle: three
// streams in turn keep it busy.
//
//   |---- a: kLane bytes ----|---- b ----|---- c ----|  then  state = a * x^(16 kLane) +
//                                                                     b * x^(8 kLane) + c
// Long lanes make the multiplications cheap, short ones serve what is left and short pieces.
constexpr std::size_t kLongLane = kStepBytes / 3;
constexpr std::size_t kShortLane = 256;

#ifdef KVTIER_CRC_SSE42

// Without a carry, times x^(8 num_bytes): the instruction itself reduces the 64-bit product, which
// multiplies by x^32, and a product of reflected numbers is short of one more x.
template <std::size_t num_bytes>
[[gnu::target("sse4.2,pclmul")]] inline std::uint64_t shifted(std::uint64_t state) {
  constexpr std::uint32_t kFactor = power_of_x(8 * num_bytes - 33);
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)),
                                               _mm_cvtsi64_si128(kFactor), 0);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

template <std::size_t lane>
[[gnu::target("sse4.2,pclmul")]] inline std::uint64_t three_lanes(std::uint64_t state,
                                                                  const std::byte* data,
                                                                  const std::byte* ahead) {
  std::uint64_t a = state, b = 0, c = 0;
  // The hardware prefetcher stops at every page. This loop prefetches the lines of the next turn in
  // the order of their use: lane by lane, or from the first to the last.
  const std::byte* const next = ahead == nullptr ? data + 3 * lane : ahead;
  const std::size_t along = ahead == nullptr ? 1 : 3, across = ahead == nullptr ? lane : 64;
  for (std::size_t line = 0; line < lane; line += 64) {
    if constexpr (lane == kLongLane) {
      for (std::size_t i = 0; i < 3; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(next + line * along + i * across), _MM_HINT_T0);
    }
    for (std::size_t at = line; at < line + 64; at += 8) {
      a = _mm_crc32_u64(a, load_u64(data + at));
      b = _mm_crc32_u64(b, load_u64(data + at + lane));
      c = _mm_crc32_u64(c, load_u64(data + at + 2 * lane));
    }
  }
  return shifted<2 * lane>(a) ^ shifted<lane>(b) ^ c;
}

[[gnu::target("sse4.2,pclmul")]] std::uint32_t update_sse42(std::uint32_t before,
                                                            const std::byte* data,
                                                            std::size_t num_bytes,
                                                            const std::byte* ahead) {
  std::uint64_t state = before;
  for (; num_bytes >= kStepBytes; data += kStepBytes, num_bytes -= kStepBytes) {
    state = three_lanes<kLongLane>(state, data, ahead);
    if (ahead != nullptr) ahead += kStepBytes;
  }
  for (; num_bytes >= 3 * kShortLane; data += 3 * kShortLane, num_bytes -= 3 * kShortLane)
    state = three_lanes<kShortLane>(state, data, ahead);
  for (; num_bytes >= 8; data += 8, num_bytes -= 8) state = _mm_crc32_u64(state, load_u64(data));
  auto last = static_cast<std::uint32_t>(state);
  for (; num_bytes > 0; ++data, --num_bytes)
    last = _mm_crc32_u8(last, std::to_integer<unsigned char>(*data));
  return last;
}

#elif defined(KVTIER_CRC_ARMV8)

constexpr unsigned long kHasCrc32 = 1ul << 7;  // HWCAP_CRC32 of <asm/hwcap.h>

[[gnu::target("+crc")]] inline std::uint32_t step_u64(std::uint32_t state, std::uint64_t word) {
  return __builtin_aarch64_crc32cx(state, word);
}

template <std::size_t lane>
[[gnu::target("+crc")]] inline std::uint32_t three_lanes(std::uint32_t state,
                                                         const std::byte* data) {
  std::uint32_t a = state, b = 0, c = 0;
  for (std::size_t at = 0; at < lane; at += 8) {
    a = step_u64(a, load_u64(data + at));
    b = step_u64(b, load_u64(data + at + lane));
    c = step_u64(c, load_u64(data + at + 2 * lane));
  }
  constexpr std::uint32_t kTwo = power_of_x(16 * lane), kOne = power_of_x(8 * lane);
  return multiply(kTwo, a) ^ multiply(kOne, b) ^ c;
}

[[gnu::target("+crc")]] std::uint32_t update_armv8(std::uint32_t state, const std::byte* data,
                                                   std::size_t num_bytes, const std::byte*) {
  for (; num_bytes >= 3 * kLongLane; data += 3 * kLongLane, num_bytes -= 3 * kLongLane)
    state = three_lanes<kLongLane>(state, data);
  for (; num_bytes >= 8; data += 8, num_bytes -= 8) state = step_u64(state, load_u64(data));
  for (; num_bytes > 0; ++data, --num_bytes)
    state = __builtin_aarch64_crc32cb(state, std::to_integer<unsigned char>(*data));
  return state;
}

#endif

struct Choice {
  Update update;
  const char* kind;
};

Choice choose() {
#if defined(KVTIER_CRC_SSE42)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))
    return {update_sse42, "sse4.2"};
#elif defined(KVTIER_CRC_ARMV8)
  if (getauxval(AT_HWCAP) & kHasCrc32) return {update_armv8, "armv8"};
#endif
  return {update_table, "table"};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

std::uint32_t crc32c(const std::byte* data, std::size_t num_bytes, std::uint32_t seed) {
  return crc32c_step(data, num_bytes, seed, nullptr);
}

std::uint32_t crc32c_step(const std::byte* data, std::size_t num_bytes, std::uint32_t seed,
                          const std::byte* ahead) {
  return ~chosen().update(~seed, data, num_bytes, ahead);
}

std::uint32_t crc32c_table(const std::byte* data, std::size_t num_bytes, std::uint32_t seed) {
  return ~update_table(~seed, data, num_bytes, nullptr);
}

const char* crc32c_kind() { return chosen().kind; }

void crc32c_many(const std::uint64_t* address, const std::uint64_t* size, std::size_t num,
                 std::size_t num_threads, std::uint32_t* result) {
  std::atomic<std::size_t> next{0};
  WorkerPool::shared().run(std::min(num_threads, num), [&] {
    for (;;) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num) return;
      result[i] = crc32c(reinterpret_cast<const std::byte*>(address[i]), size[i]);
    }
  });
}

void crc32c_rows(const std::byte* first, std::size_t num, std::size_t width, std::ptrdiff_t stride,
                 std::uint32_t* result) {
  for (std::size_t i = 0; i < num; ++i)
    result[i] = crc32c(first + static_cast<std::ptrdiff_t>(i) * stride, width);
}

}  // namespace kvtier::crc
