#include "policy/live.hpp"

#include "policy/lfuda.hpp"
#include "policy/list_policies.hpp"
#include "policy/live_queues.hpp"
#include "policy/live_runs.hpp"

namespace kvtier::policy {

namespace {

using Make = std::unique_ptr<Live> (*)(const Keeper&);

template <typename Queues>
std::unique_ptr<Live> make_queues(const Keeper& keeper) {
  return std::make_unique<LiveQueues<Queues>>(kUsualRoom, keeper);
}

std::unique_ptr<Live> make_runs(const Keeper& keeper) {
  constexpr std::uint64_t kSeed = 7;  // where there are many blocks, the policy samples
  return std::make_unique<LiveRuns>(kUsualRoom, kSeed, 0.0, keeper);
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

std::unique_ptr<Live> make_live(std::string_view name, const Keeper& keeper) {
  return maker_of(name)(keeper);
}

}  // namespace kvtier::policy
