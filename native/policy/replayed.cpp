#include "policy/replayed.hpp"

#include "policy/replayed_lists.hpp"
#include "policy/replayed_runs.hpp"

namespace kvtier::policy {

std::unique_ptr<Replayed> make_replayed(std::string_view name, std::size_t capacity,
                                        std::uint64_t seed, double doubles_at_blocks) {
  if (name == "runs") return std::make_unique<ReplayedRuns>(capacity, seed, doubles_at_blocks);
  if (name == "lru") return std::make_unique<ReplayedLru>(capacity);
  if (name == "arc") return std::make_unique<ReplayedLists<Arc>>(capacity);
  if (name == "s3fifo") return std::make_unique<ReplayedLists<S3Fifo>>(capacity);
  if (name == "lfuda") return std::make_unique<ReplayedLfuda>(capacity);
  if (name == "sieve") return std::make_unique<ReplayedLists<Sieve>>(capacity);
  return nullptr;
}

}  // namespace kvtier::policy
