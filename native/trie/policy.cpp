#include "trie/policy.hpp"

namespace kvtier::trie {

namespace {

constexpr std::size_t kArity = 4;  // flatter than a binary heap, and four entries are a cache line

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, TierView view) {
  if (name == "lru") return std::make_unique<Lru>(view);
  return nullptr;
}

void Lru::offer(Index index) {
  Residency& residency = view_.residency(index);
  residency.queued = true;
  const Entry entry{residency.last_use, view_.id(index)};
  if (hole_) {
    hole_ = false;
    heap_[0] = entry;
    sift_down(0);
  } else {
    heap_.push_back(entry);
    sift_up(heap_.size() - 1);
  }
}

Index Lru::victim() {
  if (hole_) drop_top();
  while (!heap_.empty()) {
    Entry& top = heap_[0];
    Residency& residency = view_.residency(top.index());
    if (!residency.evictable()) {
      residency.queued = false;
      drop_top();
    } else if (residency.last_use != top.last_use) {
      top.last_use = residency.last_use;
      sift_down(0);
    } else {
      residency.queued = false;
      hole_ = true;
      return top.index();
    }
  }
  return kNone;
}

void Lru::withdraw(Index index) {
  if (hole_) drop_top();
  for (std::size_t at = 0; at < heap_.size(); ++at) {
    if (heap_[at].index() != index) continue;
    view_.residency(index).queued = false;
    heap_[at] = heap_.back();
    heap_.pop_back();
    if (at < heap_.size()) {
      sift_down(at);
      sift_up(at);
    }
    return;
  }
}

void Lru::drop_top() {
  hole_ = false;
  heap_[0] = heap_.back();
  heap_.pop_back();
  if (!heap_.empty()) sift_down(0);
}

void Lru::sift_down(std::size_t at) {
  const Entry entry = heap_[at];
  while (true) {
    const std::size_t first = kArity * at + 1;
    if (first >= heap_.size()) break;
    const std::size_t end = first + kArity < heap_.size() ? first + kArity : heap_.size();
    std::size_t least = first;
    for (std::size_t child = first + 1; child < end; ++child)
      if (heap_[child] < heap_[least]) least = child;
    if (!(heap_[least] < entry)) break;
    heap_[at] = heap_[least];
    at = least;
  }
  heap_[at] = entry;
}

void Lru::sift_up(std::size_t at) {
  const Entry entry = heap_[at];
  while (at > 0) {
    const std::size_t above = (at - 1) / kArity;
    if (!(entry < heap_[above])) break;
    heap_[at] = heap_[above];
    at = above;
  }
  heap_[at] = entry;
}

void Lru::check() const {
  for (std::size_t at = hole_ ? 1 : 0; at < heap_.size(); ++at) {
    const Entry& entry = heap_[at];
    promise(entry.block == view_.id(entry.index()), "lru: an entry of a block that is gone");
    const Residency& residency = view_.residency(entry.index());
    promise(residency.queued, "lru: an entry of a block that is not queued");
    promise(residency.state == State::ready, "lru: a queued block is not ready");
    promise(entry.last_use <= residency.last_use, "lru: an entry is younger than its block");
    const std::size_t above = (at - 1) / kArity;
    if (at > 0 && !(hole_ && above == 0))
      promise(!(entry < heap_[above]), "lru: the heap is out of order");
  }
}

}  // namespace kvtier::trie
