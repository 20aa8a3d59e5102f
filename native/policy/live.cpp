#include "policy/live.hpp"

#include "policy/lfuda.hpp"
#include "policy/list_policies.hpp"
#include "policy/live_queues.hpp"
#include "policy/live_runs.hpp"

namespace kvtier::policy {

namespace {

using Make = std::unique_ptr<Live> (*)(std::size_t, std::uint64_t, const Keeper&);

template <typename Queues>
std::unique_ptr<Live> make_queues(std::size_t capacity, std::uint64_t, const Keeper& keeper) {
  return std::make_unique<LiveQueues<Queues>>(capacity, keeper);
}

std::unique_ptr<Live> make_runs(std::size_t capacity, std::uint64_t seed, const Keeper& keeper) {
  return std::make_unique<LiveRuns>(capacity, seed, 0.0, keeper);
}

// Null where there is none of that name.
Make maker_of(std::string_view name) {
  if (name == "runs") return make_runs;
  if (name == "arc") return make_queues<Arc>;
  if (name == "s3fifo") return make_queues<S3Fifo>;
  if (name == "lfuda") return make_queues<Lfuda>;
  if (name == "sieve") return make_queues<Sieve>;
  return nullptr;
}

}  // namespace

bool has_live(std::string_view name) { return maker_of(name) != nullptr; }

std::unique_ptr<Live> make_live(std::string_view name, std::size_t capacity, std::uint64_t seed,
                                const Keeper& keeper) {
  const Make make = maker_of(name);
  return make == nullptr ? nullptr : make(capacity, seed, keeper);
}

}  // namespace kvtier::policy
