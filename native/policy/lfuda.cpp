#include "policy/lfuda.hpp"

#include <algorithm>

#include "policy/promise.hpp"

namespace kvtier::policy {

std::size_t Lfuda::request(std::span<const Key> path, double) {
  ++num_requests_;
  blocks_.follow(path, path_);
  const std::size_t num_hits = path_.size();
  for (const Index block : path_) {
    if (blocks_.is_leaf(block)) leaves_.erase(leaf(block));
    Mark& mark = blocks_[block].mark;
    mark.worth = last_worth_ + ++mark.num_uses;
    mark.request = num_requests_;
  }
  for (std::size_t i = num_hits; i < path.size(); ++i) {
    if (blocks_.size() == capacity_ && !make_room()) break;
    const auto depth = static_cast<std::uint32_t>(i);
    const Mark mark{last_worth_ + 1, num_requests_, num_stored_, 1, depth};
    path_.push_back(blocks_.add(path[i], i > 0 ? path_[i - 1] : kNone, mark));
    ++num_stored_;
  }
  if (!path_.empty() && blocks_.is_leaf(path_.back())) leaves_.insert(leaf(path_.back()));
  return num_hits;
}

bool Lfuda::make_room() {
  if (leaves_.empty()) return false;
  const Leaf least = *leaves_.begin();
  leaves_.erase(leaves_.begin());
  last_worth_ = std::max(last_worth_, least.worth);
  const Index parent = blocks_.remove(least.block);
  if (parent != kNone && blocks_.is_leaf(parent) && blocks_[parent].mark.request != num_requests_)
    leaves_.insert(leaf(parent));
  return true;
}

std::size_t Lfuda::num_bytes() const {
  constexpr std::size_t kNode = sizeof(Leaf) + 4 * sizeof(void*);  // as usual in standard libraries
  return sizeof(*this) + blocks_.num_bytes() + leaves_.size() * kNode;
}

void Lfuda::check() const {
  promise(blocks_.size() <= capacity_, "lfuda: more blocks than there is room for");
  for (const Leaf& each : leaves_)
    promise(blocks_.is_leaf(each.block) && each == leaf(each.block),
            "lfuda: a leaf is out of date");
  promise(blocks_.size() == 0 || !leaves_.empty(), "lfuda: no block may leave");
}

}  // namespace kvtier::policy
