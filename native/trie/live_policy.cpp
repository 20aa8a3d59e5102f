#include "trie/live_policy.hpp"

namespace kvtier::trie {

LivePolicy::LivePolicy(ColumnView view, std::string_view name)
    : view_(view), live_(policy::make_live(name, *this)) {}

void LivePolicy::entered(Index index) {
  const Node& node = view_.node(index);
  const bool has_parent = view_.is_block(node.parent) && view_.queued(node.parent);
  const Index parent = has_parent ? node.parent : policy::kNone;
  view_.queued(index) = true;
  live_->entered(node.hash, index, policy::Live::Place{parent, node.depth - 1});
}

Index LivePolicy::victim() {
  const Index index = live_->next_victim();
  if (index != kNone) view_.queued(index) = false;
  return index;
}

void LivePolicy::withdraw(Index index) {
  view_.queued(index) = false;
  live_->left(index);
}

}  // namespace kvtier::trie
