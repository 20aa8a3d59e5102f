#include "policy/replayed_lists.hpp"

namespace kvtier::policy {

// -- LRU
// ---------------------------------------------------------------------------------------------

std::size_t ReplayedLru::request(std::span<const Key> path, double) {
  path_.clear();
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i + 8 < path.size()) lists_.prefetch(path[i + 8]);
    const Index block = lists_.find(path[i]);
    if (block == kNone) break;
    path_.push_back(block);
  }
  const std::size_t num_hits = path_.size();
  for (const Index block : path_) lists_.take(block);
  for (std::size_t i = num_hits; i < path.size(); ++i) {
    if (path_.size() + lists_.size(0) == capacity_) {
      if (lists_.oldest(0) == kNone) break;
      lists_.remove(lists_.oldest(0));
    }
    path_.push_back(lists_.make(path[i]));
    ++num_stored_;
  }
  for (std::size_t i = path_.size(); i-- > 0;) lists_.put(path_[i], 0);
  return num_hits;
}

void ReplayedLru::check() const {
  lists_.check();
  promise(num_blocks() <= capacity_, "lru: more blocks than there is room for");
}

// -- LFU with ageing
// ---------------------------------------------------------------------------------------------

std::size_t ReplayedLfuda::request(std::span<const Key> path, double) {
  names_.follow(path, path_);
  const std::size_t num_hits = path_.size();
  queues_.use(path, path_);
  for (const Index block : path_) names_.hold(block, true);
  store(path);
  for (const Index block : path_) names_.hold(block, false);
  if (!path_.empty()) queues_.let_go(path_.back());
  return num_hits;
}

// Stores the first blocks of the path, as far as there is room.
void ReplayedLfuda::store(std::span<const Key> path) {
  for (std::size_t at = path_.size(); at < path.size(); ++at) {
    if (num_blocks() == capacity_) {
      const Index left = queues_.next_victim();
      if (left == kNone) return;
      names_.remove(left);
    }
    const Index parent = path_.empty() ? kNone : path_.back();
    const Live::Place place{parent, static_cast<std::uint32_t>(at)};
    const Index item = names_.add(path[at]);
    queues_.entered(path[at], item, place);
    names_.hold(item, true);
    path_.push_back(item);
    ++num_stored_;
  }
}

void ReplayedLfuda::check() const {
  queues_.check();
  promise(num_blocks() <= capacity_, "lfuda: more blocks than there is room for");
}

}  // namespace kvtier::policy
