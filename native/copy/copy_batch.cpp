#include "copy/copy_batch.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "common/worker_pool.hpp"
#include "copy/path_choice.hpp"
#include "copy/streaming.hpp"

namespace kvtier::copy {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kPage = 4 * kKiB;
constexpr std::size_t kPartBytes = 1024 * kKiB;  // what one thread takes at a time
// Below these, memcpy: the batch fits the cache, or the fragments are too short for two in turn.
constexpr std::size_t kMinStreamedBatch = 1024 * kKiB;
constexpr std::size_t kMinStreamedFragment = kKiB;

// Cuts the list into parts of about kPartBytes. A part ends with a fragment if one ends near, and
// else splits one at a multiple of the page size.
std::vector<Part> cut(const Fragments& list, std::size_t num_bytes) {
  std::vector<Part> parts;
  parts.reserve(num_bytes / kPartBytes * 2 + 1);
  Part part{0, 0, 0};
  for (std::size_t i = 0; i < list.num; ++i) {
    std::size_t done = 0;
    while (done < list.size[i]) {
      const std::size_t rest = list.size[i] - done;
      const std::size_t room = kPartBytes - part.num_bytes;
      if (rest <= room + kPartBytes / 2) {
        part.num_bytes += rest;
        done = list.size[i];
        if (part.num_bytes < kPartBytes) continue;
        parts.push_back(part);
        part = {i + 1, 0, 0};
      } else {
        const std::size_t taken = room / kPage * kPage;
        part.num_bytes += taken;
        done += taken;
        parts.push_back(part);
        part = {i, done, 0};
      }
    }
  }
  if (part.num_bytes > 0) parts.push_back(part);
  return parts;
}

// Short, middle and long fragments behave differently, so each kind has its own choice.
PathChoice& choice_for(std::size_t fragment_bytes) {
  static std::array<PathChoice, 3> choices;
  if (fragment_bytes < 8 * kKiB) return choices[0];
  return choices[fragment_bytes < 128 * kKiB ? 1 : 2];
}

void copy_part(const Fragments& list, const Part& part, PathChoice& choice) {
  take_turn(choice, part.num_bytes, [&](Path path) {
    (path == Path::kStreaming ? copy_part_streaming : copy_part_plain)(list, part);
  });
}

}  // namespace

void copy_batch(const Fragments& list, std::size_t num_bytes, std::size_t num_threads) {
  if (num_bytes == 0) return;
  const std::size_t fragment_bytes = num_bytes / list.num;
  if (num_bytes < kMinStreamedBatch) {
    copy_part_plain(list, {0, 0, num_bytes});
    return;
  }
  const bool may_stream = kStreamingBuilt && fragment_bytes >= kMinStreamedFragment;
  PathChoice* const choice = may_stream ? &choice_for(fragment_bytes) : nullptr;
  const std::vector<Part> parts = cut(list, num_bytes);
  std::atomic<std::size_t> next_part{0};
  WorkerPool::shared().run(std::min(num_threads, parts.size()), [&] {
    for (;;) {
      const std::size_t i = next_part.fetch_add(1, std::memory_order_relaxed);
      if (i >= parts.size()) return;
      if (choice != nullptr)
        copy_part(list, parts[i], *choice);
      else
        copy_part_plain(list, parts[i]);
    }
  });
}

}  // namespace kvtier::copy
