#include "policy/replayed_runs.hpp"

#include "common/promise.hpp"

namespace kvtier::policy {

std::size_t ReplayedRuns::request(std::span<const Key> path, double now) {
  if (path.empty()) return 0;
  names_.follow(path, path_);
  const std::size_t num_hits = path_.size();
  policy_.begin(path, path_, now);
  store(path);
  policy_.keep_runs(path, path_, true);
  return num_hits;
}

// Stores the first blocks of the path, as far as they are admitted. No run has the blocks of the
// path now, so none of them is evicted.
void ReplayedRuns::store(std::span<const Key> path) {
  for (const RunPolicy::Part& part : policy_.parts()) {
    if (part.hi <= path_.size()) continue;
    const double gain = policy_.gain(part);
    while (path_.size() < part.hi) {
      if (!make_room(gain)) return;
      const Index item = names_.add(path[path_.size()]);
      path_.push_back(policy_.add(path_.empty() ? kNone : path_.back(), item));
      ++num_stored_;
    }
  }
}

bool ReplayedRuns::make_room(double gain) {
  if (policy_.num_blocks() < capacity_) return true;
  const Index left = policy_.lose_one(gain);
  if (left == kNone) return false;
  names_.remove(left);
  return true;
}

void ReplayedRuns::check() const {
  policy_.check();
  promise(num_blocks() <= capacity_, "runs: more blocks than there is room for");
}

}  // namespace kvtier::policy
