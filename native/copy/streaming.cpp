#include "copy/streaming.hpp"

#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace kvtier::copy {

void copy_part_plain(const Fragments& list, const Part& part) {
  Walk walk(list, part);
  for (Span span; walk.next(span);) std::memcpy(span.dst, span.src, span.size);
}

#if defined(__x86_64__) || defined(_M_X64)
namespace {

// A plain store first reads the line that it writes. A non-temporal store does not, and leaves the
// cache to the model's own data; it pays when the batch is larger than the cache.
//
// The hardware prefetcher needs a few lines before it runs ahead, at the start of every fragment.
// Two fragments are therefore copied in turn, kStep bytes of each: one is at full speed while the
// other warms up. The first lines of the next one are prefetched.
//
//   fragment k    |####>.......|            256 bytes of k, 256 bytes of k+1, ...
//   fragment k+1  |##>.........|
//   fragment k+2  |pp          |            p: prefetched when k+1 began
//
// Measured with fragments of 2 KiB to 1 MiB: three or four in turn were slower, 128 bytes in turn
// too, 512 made no difference; prefetching 8 lines was better than 0, 16 or 32.
constexpr std::size_t kLine = 64;
constexpr std::size_t kStep = 256;
constexpr std::size_t kPrefetchLines = 8;
constexpr std::size_t kWorthSharing = 4096;

// Copies `num_bytes` of both spans in turn. Destinations are aligned to kLine, `num_bytes` is a
// multiple of kStep.
using CopyInTurn = void (*)(const Span& a, const Span& b, std::size_t num_bytes);

void copy_in_turn_sse2(const Span& a, const Span& b, std::size_t num_bytes) {
  const auto copy_line = [](std::byte* dst, const std::byte* src) {
    auto* to = reinterpret_cast<__m128i*>(dst);
    const auto* from = reinterpret_cast<const __m128i*>(src);
    const __m128i w0 = _mm_loadu_si128(from);
    const __m128i w1 = _mm_loadu_si128(from + 1);
    const __m128i w2 = _mm_loadu_si128(from + 2);
    const __m128i w3 = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, w0);
    _mm_stream_si128(to + 1, w1);
    _mm_stream_si128(to + 2, w2);
    _mm_stream_si128(to + 3, w3);
  };
  for (std::size_t at = 0; at < num_bytes; at += kStep) {
    for (std::size_t i = at; i < at + kStep; i += kLine) copy_line(a.dst + i, a.src + i);
    for (std::size_t i = at; i < at + kStep; i += kLine) copy_line(b.dst + i, b.src + i);
  }
}

#if defined(__GNUC__)
#define KVTIER_AVX2 1

// About 7 % faster than with 16-byte words. Compiled for AVX2 whatever the build's flags are, and
// called only where the processor has it.
[[gnu::target("avx2")]] void copy_in_turn_avx2(const Span& a, const Span& b,
                                               std::size_t num_bytes) {
  const auto copy_two_lines = [](std::byte* dst, const std::byte* src)
                                  __attribute__((target("avx2"), always_inline)) {
                                    auto* to = reinterpret_cast<__m256i*>(dst);
                                    const auto* from = reinterpret_cast<const __m256i*>(src);
                                    const __m256i w0 = _mm256_loadu_si256(from);
                                    const __m256i w1 = _mm256_loadu_si256(from + 1);
                                    const __m256i w2 = _mm256_loadu_si256(from + 2);
                                    const __m256i w3 = _mm256_loadu_si256(from + 3);
                                    _mm256_stream_si256(to, w0);
                                    _mm256_stream_si256(to + 1, w1);
                                    _mm256_stream_si256(to + 2, w2);
                                    _mm256_stream_si256(to + 3, w3);
                                  };
  for (std::size_t at = 0; at < num_bytes; at += kStep) {
    for (std::size_t i = at; i < at + kStep; i += 2 * kLine) copy_two_lines(a.dst + i, a.src + i);
    for (std::size_t i = at; i < at + kStep; i += 2 * kLine) copy_two_lines(b.dst + i, b.src + i);
  }
}
#endif

CopyInTurn best_copy_in_turn() {
#ifdef KVTIER_AVX2
  if (__builtin_cpu_supports("avx2")) return copy_in_turn_avx2;
#endif
  return copy_in_turn_sse2;
}

// The next `num_bytes` of a span, by memcpy.
void copy_front(Span& span, std::size_t num_bytes) {
  if (num_bytes == 0) return;
  std::memcpy(span.dst, span.src, num_bytes);
  span.drop_front(num_bytes);
}

// Ends `span` and gives it a new one of at least kStep bytes, aligned for the stores: the next of
// the walk or, after the last, half of what the other stream still has to do.
bool refill(Span& span, Walk& walk, Span& other) {
  copy_front(span, span.size);
  while (walk.next(span)) {
    if (const std::byte* ahead = walk.peek()) {
      for (std::size_t line = 0; line < kPrefetchLines; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line * kLine), _MM_HINT_T0);
    }
    const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(span.dst)) % kLine;
    copy_front(span, std::min(head, span.size));
    if (span.size >= kStep) return true;
    copy_front(span, span.size);
  }
  if (other.size < kWorthSharing) return false;
  const std::size_t keep = (other.size / 2 + kLine - 1) / kLine * kLine;
  span = {other.dst + keep, other.src + keep, other.size - keep};
  other.size = keep;
  return true;
}

}  // namespace

void copy_part_streaming(const Fragments& list, const Part& part) {
  static const CopyInTurn copy_in_turn = best_copy_in_turn();
  Walk walk(list, part);
  Span a{nullptr, nullptr, 0};
  Span b{nullptr, nullptr, 0};
  bool more = refill(a, walk, b) && refill(b, walk, a);
  while (more) {
    const std::size_t num_bytes = std::min(a.size, b.size) / kStep * kStep;
    copy_in_turn(a, b, num_bytes);
    a.drop_front(num_bytes);
    b.drop_front(num_bytes);
    more = (a.size >= kStep || refill(a, walk, b)) && (b.size >= kStep || refill(b, walk, a));
  }
  copy_front(a, a.size);
  copy_front(b, b.size);
  _mm_sfence();  // the bytes are visible before the copy is reported as done
}

void stream_out(std::byte* dst, const std::byte* src, std::size_t num_bytes) {
  static const CopyInTurn copy_in_turn = best_copy_in_turn();
  Span span{dst, src, num_bytes};
  copy_front(span, std::min((0 - reinterpret_cast<std::uintptr_t>(dst)) % kLine, num_bytes));
  const std::size_t half = span.size / 2 / kStep * kStep;
  copy_in_turn(span, {span.dst + half, span.src + half, half}, half);
  span.drop_front(2 * half);
  copy_front(span, span.size);
}

void end_streaming() { _mm_sfence(); }

#else

void stream_out(std::byte* dst, const std::byte* src, std::size_t num_bytes) {
  std::memcpy(dst, src, num_bytes);
}

void end_streaming() {}

void copy_part_streaming(const Fragments& list, const Part& part) { copy_part_plain(list, part); }

#endif

}  // namespace kvtier::copy
