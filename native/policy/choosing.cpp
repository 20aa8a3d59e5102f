// Choice of the run whose blocks are evicted first.
#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <vector>

#include "policy/run_policy.hpp"

namespace kvtier::policy {

namespace {

constexpr double kClearly = 0.7;  // of the oldest's value; a run worth less is the victim instead
constexpr std::uint32_t kLooks = 32;  // candidates examined per victim
constexpr std::uint32_t kMaxSearched = 1U << 16;  // runs searched in order if sampling finds none

}  // namespace

// Returns how many children of `tail` count as evicted, since `admit` has passed over their runs.
std::uint32_t RunPolicy::num_gone_behind(Index tail) const {
  return static_cast<std::uint32_t>(std::count(exposed_.begin(), exposed_.end(), tail));
}

// Whether no resident block is behind the run's resident blocks.
bool RunPolicy::ends_a_path(Index run) const {
  const Run& it = runs_[run];
  if (!it.is_resident()) return false;
  if (!it.is_inside) return true;
  const std::uint32_t num_gone = num_gone_behind(it.tail);
  return num_gone > 0 && blocks_[it.tail].num_children == num_gone;
}

// Whether the keeper allows the eviction of the last block, if no block is behind it.
bool RunPolicy::is_let_go(Index run) const {
  const Run& it = runs_[run];
  const std::uint32_t num_gone = it.is_inside ? num_gone_behind(it.tail) : 0;
  return keeper_.may_leave(blocks_.item(it.tail), num_gone);
}

// Returns the run to evict from: of the lowest level that has a candidate.
Index RunPolicy::choose() {
  for (std::size_t level = 0; level < kNumLevels; ++level)
    if (const Index run = choose_among(runs_.residents(level)); run != kNone) return run;
  return kNone;
}

// Whether the run may be a candidate, judged without reading it: its list entry is not inside, or
// it has a block in front of a passed-over run.
bool RunPolicy::may_end_a_path(const Resident& resident) const {
  bool may = !resident.is_inside;
  for (const Index block : exposed_) may |= block != kNone && blocks_[block].run == resident.run;
  return may;
}

// Returns the best of all runs if they are few, else of a sample.
Index RunPolicy::choose_among(const List<Resident>& residents) {
  const std::uint32_t num = residents.size();
  leaves_.clear();
  if (num <= 4 * kLooks) {
    for (std::uint32_t at = 0; at < num; ++at) look_at(residents[at].run);
    return best_leaf();
  }
  const std::size_t num_wanted = decides_as_lru() ? 4 * kLooks : kLooks;
  std::array<Resident, kLooks> some;
  for (int round = 0; round < 4 && leaves_.size() < num_wanted; ++round) {
    // Runs are prefetched while earlier ones are examined; so are the entries of the next round, or
    // of the first round of the next choice. No branch depends on memory that is still being
    // fetched.
    std::uint32_t at = random_.below(num);
    residents.prefetch(random_.next_below(num), kLooks);
    for (Resident& it : some) {
      it = residents[at];
      at = at + 1 < num ? at + 1 : 0;
    }
    std::size_t num_some = 0;
    for (const Resident& it : some) {
      some[num_some] = it;
      num_some += may_end_a_path(it);
    }
    const std::span<const Resident> these(some.data(), num_some);
    for (const Resident& it : these) runs_.prefetch(it.run);
    for (const Resident& it : these)
      if (leaves_.size() < num_wanted) look_at(it.run);
    Index run = residents[0].run;
    for (std::uint32_t next = random_.next_below(num), i = 0; i < kLooks && next < num; ++i, ++next) {
      run = residents[next].is_inside ? run : residents[next].run;
      runs_.prefetch(run);
    }
  }
  if (const Index run = best_leaf(); run != kNone) return run;
  // Hardly any is a candidate: the current path has taken them, or the keeper holds them.
  for (std::uint32_t at = 0; at < std::min(num, kMaxSearched); ++at)
    if (const Index run = residents[at].run; may_shrink(run) && !is_passed_over(run)) return run;
  return kNone;
}

bool RunPolicy::is_passed_over(Index run) const {
  return std::find(passed_over_.begin(), passed_over_.end(), run) != passed_over_.end();
}

void RunPolicy::look_at(Index run) {
  if (!ends_a_path(run) || is_passed_over(run)) return;
  const Run& it = runs_[run];
  leaves_.push_back({run, it.number, decides_as_lru() ? 0.0 : value(it)});
}

// The keeper is queried only for a run that is about to be chosen, since that costs a memory
// access.
Index RunPolicy::best_leaf() {
  const auto is_older = [](const Leaf& one, const Leaf& other) { return one.number < other.number; };
  const auto is_cheaper = [](const Leaf& one, const Leaf& other) {
    return std::tie(one.value, one.number) < std::tie(other.value, other.number);
  };
  const auto take_out = [this](std::vector<Leaf>::iterator leaf) {
    *leaf = leaves_.back();
    leaves_.pop_back();
  };
  while (!leaves_.empty()) {
    const auto oldest = std::min_element(leaves_.begin(), leaves_.end(), is_older);
    if (!is_let_go(oldest->run)) {
      take_out(oldest);
      continue;
    }
    if (decides_as_lru()) return oldest->run;
    const auto cheapest = std::min_element(leaves_.begin(), leaves_.end(), is_cheaper);
    if (cheapest->value >= kClearly * oldest->value) return oldest->run;
    if (is_let_go(cheapest->run)) return cheapest->run;
    take_out(cheapest);
  }
  return kNone;
}

}  // namespace kvtier::policy
