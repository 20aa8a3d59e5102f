// Blocks that leave a column, and nodes that nothing needs any more.
#include "trie/block_trie.hpp"

namespace kvtier::trie {

namespace {

constexpr Index kAhead = 12;  // blocks between what is used and what is fetched into the cache

}  // namespace

void BlockTrie::evict(std::size_t column, std::size_t num_blocks, Path& chosen) {
  Column& it = columns_[column];
  if (it.learned) it.learned->live().begin_evicting();
  while (chosen.size() < num_blocks) {
    const Index index = it.learned ? it.learned->victim() : it.queue.victim();
    if (index == kNone) return;
    // Its ancestors, which follow it, mostly lie before it.
    if (index >= kAhead) nodes_.prefetch_evicted(index - kAhead);
    move(index, column, State::evicting);
    --it.idle;
    count_in_parent(index, column, false);
    chosen.push_back(nodes_.id(index));
  }
}

void BlockTrie::forget(std::span<const BlockId> blocks, std::size_t column,
                       std::vector<Slot>& slots) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i + kAhead < blocks.size()) {
      const Index ahead = static_cast<Index>(blocks[i + kAhead]);
      if (ahead < nodes_.end()) table_.prefetch(nodes_[ahead].hash);
    }
    slots.push_back(leave(at(blocks[i]), column));
  }
}

void BlockTrie::keep(BlockId block, std::size_t column) {
  const Index index = at(block);
  move(index, column, State::ready);
  ++columns_[column].idle;
  count_in_parent(index, column, true);
  enter(index, column);
  review(index, column);
}

std::optional<Slot> BlockTrie::lose(BlockId block, std::size_t column) {
  const Index index = at(block);
  if (nodes_.standing(index, column).leases > 0) return std::nullopt;
  move(index, column, State::evicting);
  --columns_[column].idle;
  count_in_parent(index, column, false);
  return leave(index, column);
}

Slot BlockTrie::leave(Index index, std::size_t column) {
  Residency& residency = nodes_.residency(index, column);
  const State before = residency.state;
  move(index, column, State::absent);
  Column& it = columns_[column];
  if (residency.queued && it.learned) it.learned->withdraw(index);
  else if (residency.queued) it.queue.withdraw(index);
  const Slot slot = residency.slot;
  residency.slot = 0;
  nodes_.standing(index, column).last_use = 0.0;
  --it.held;
  if (before != State::evicting) count_in_parent(index, column, false);
  prune(index);
  return slot;
}

bool BlockTrie::is_cached(Index index) const {
  for (std::size_t column = 0; column < nodes_.num_columns(); ++column)
    if (nodes_.residency(index, column).state != State::absent) return true;
  return false;
}

void BlockTrie::prune(Index index) {
  while (nodes_.is_block(index) && nodes_[index].num_children == 0 && !is_cached(index)) {
    const Node& node = nodes_[index];
    const Index parent = node.parent;
    table_.erase(node.hash, [index](Index other) { return other == index; });
    if (nodes_[parent].hint == index) nodes_[parent].hint = kNone;
    --nodes_[parent].num_children;
    nodes_.free(index);
    index = parent;
  }
  const Node& node = nodes_[index];
  if (node.parent == kRoot && node.num_children == 0) {
    const Label space = label(index);
    roots_.erase(std::string(reinterpret_cast<const char*>(space.data), space.size));
    if (last_root_ == index) last_root_ = kNone;
    nodes_.free(index);
  }
}

}  // namespace kvtier::trie
