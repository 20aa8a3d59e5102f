#include "copy/copy_checked.hpp"

#include <algorithm>
#include <cstring>

#include "copy/path_choice.hpp"
#include "copy/streaming.hpp"
#include "crc/crc32c.hpp"

namespace kvtier::copy {
namespace {

constexpr std::size_t kTurnBytes = std::size_t{1} << 20;  // what is copied on one path at a time
// Below these, plain stores: the batch fits the cache, or the pieces are too short.
constexpr std::size_t kMinStreamedBatch = std::size_t{1} << 20;
constexpr std::size_t kMinStreamedPiece = 1024;

void store_plain(std::byte* dst, const std::byte* src, std::size_t num_bytes) {
  std::memcpy(dst, src, num_bytes);
}

// Goes through the spans of a walk, some bytes at a time.
class Cursor {
 public:
  Cursor(const Fragments& list, const Part& part) : walk_(list, part) {}

  // Calls move(span, at, size) for the next `num_bytes`; `at` counts from the first of them.
  template <typename Move>
  void go(std::size_t num_bytes, const Move& move) {
    for (std::size_t at = 0; at < num_bytes;) {
      if (span_.size == 0 && !walk_.next(span_)) return;
      const std::size_t size = std::min(span_.size, num_bytes - at);
      move(span_, at, size);
      span_.drop_front(size);
      at += size;
    }
  }

  // Where the next byte will be read; null at the end.
  const std::byte* peek() const { return span_.size > 0 ? span_.src : walk_.peek(); }

 private:
  Walk walk_;
  Span span_{nullptr, nullptr, 0};
};

// Each step is copied through a buffer that stays in the L1 cache, and is checked there:
//
//   source --memcpy--> held --checksum--> --stores--> destination
//       |-- the lines of the next step are prefetched during the checksum
std::uint32_t copy_block(const Fragments& list, const Part& block, Path path) {
  alignas(64) std::byte held[crc::kStepBytes];
  Cursor in(list, block), out(list, block);
  std::uint32_t checksum = 0;
  for (std::size_t left = block.num_bytes; left > 0;) {
    const std::size_t num = std::min(left, crc::kStepBytes);
    in.go(num, [&](const Span& span, std::size_t at, std::size_t size) {
      std::memcpy(held + at, span.src, size);
    });
    checksum = crc::crc32c_step(held, num, checksum, in.peek());
    const auto store = path == Path::kStreaming ? stream_out : store_plain;
    out.go(num, [&](const Span& span, std::size_t at, std::size_t size) {
      store(span.dst, held + at, size);
    });
    left -= num;
  }
  return checksum;
}

PathChoice& choice_for(std::size_t piece_bytes) {
  static PathChoice shorter, longer;
  return piece_bytes < 8 * 1024 ? shorter : longer;
}

}  // namespace

void copy_checked(const Fragments& list, std::size_t num_pieces, std::size_t num_bytes,
                  std::uint32_t* checksum) {
  if (list.num == 0) return;
  const std::size_t piece_bytes = num_bytes / list.num;
  const bool may_stream =
      kStreamingBuilt && num_bytes >= kMinStreamedBatch && piece_bytes >= kMinStreamedPiece;
  const auto bytes_of = [&](std::size_t first) {
    std::size_t sum = 0;
    for (std::size_t i = first; i < first + num_pieces; ++i) sum += list.size[i];
    return sum;
  };
  for (std::size_t first = 0; first < list.num;) {
    std::size_t end = first, turn_bytes = 0;
    for (; end < list.num && turn_bytes < kTurnBytes; end += num_pieces) turn_bytes += bytes_of(end);
    const auto copy = [&](Path path) {
      for (std::size_t i = first; i < end; i += num_pieces)
        checksum[i / num_pieces] = copy_block(list, {i, 0, bytes_of(i)}, path);
      if (path == Path::kStreaming) end_streaming();
    };
    if (may_stream && turn_bytes > 0)
      take_turn(choice_for(piece_bytes), turn_bytes, copy);
    else
      copy(Path::kPlain);
    first = end;
  }
}

}  // namespace kvtier::copy
