#include "trie/lru.hpp"

namespace kvtier::trie {

namespace {

constexpr std::size_t kArity = 4;  // flatter than a binary heap, and four entries are a cache line

}  // namespace

void Lru::offer(Index index) {
  view_.queued(index) = true;
  const Entry entry{view_.last_use(index), view_.id(index)};
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
    const Index index = top.index();
    if (!view_.is_evictable(index)) {
      view_.queued(index) = false;
      drop_top();
    } else if (view_.last_use(index) != top.last_use) {
      top.last_use = view_.last_use(index);
      sift_down(0);
    } else {
      view_.queued(index) = false;
      hole_ = true;
      return index;
    }
  }
  return kNone;
}

void Lru::withdraw(Index index) {
  if (hole_) drop_top();
  for (std::size_t at = 0; at < heap_.size(); ++at) {
    if (heap_[at].index() != index) continue;
    view_.queued(index) = false;
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
    promise(view_.queued(entry.index()), "lru: an entry of a block that is not queued");
    promise(view_.state(entry.index()) == State::ready, "lru: a queued block is not ready");
    promise(entry.last_use <= view_.last_use(entry.index()),
            "lru: an entry is younger than its block");
    const std::size_t above = (at - 1) / kArity;
    if (at > 0 && !(hole_ && above == 0))
      promise(!(entry < heap_[above]), "lru: the heap is out of order");
  }
}

}  // namespace kvtier::trie
