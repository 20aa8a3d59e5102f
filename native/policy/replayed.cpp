#include "policy/replayed.hpp"

#include "policy/lfuda.hpp"
#include "policy/list_policies.hpp"
#include "policy/run_policy.hpp"

namespace kvtier::policy {

std::unique_ptr<Replayed> make_replayed(std::string_view name, std::size_t capacity,
                                        std::uint64_t seed, double doubles_at_blocks) {
  if (name == "runs") return std::make_unique<RunPolicy>(capacity, seed, doubles_at_blocks);
  if (name == "lru") return std::make_unique<LruReplayed>(capacity);
  if (name == "arc") return std::make_unique<Arc>(capacity);
  if (name == "s3fifo") return std::make_unique<S3Fifo>(capacity);
  if (name == "lfuda") return std::make_unique<Lfuda>(capacity);
  if (name == "sieve") return std::make_unique<Sieve>(capacity);
  return nullptr;
}

}  // namespace kvtier::policy
