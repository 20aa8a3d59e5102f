// Blocks that leave a tier, and nodes that nothing needs any more.
#include "trie/block_trie.hpp"

namespace kvtier::trie {

namespace {

constexpr Index kAhead = 12;  // blocks between what is used and what is fetched into the cache

}  // namespace

void BlockTrie::evict(std::size_t tier, std::size_t num_blocks, Path& chosen) {
  Policy& policy = *policies_[tier];
  while (chosen.size() < num_blocks) {
    const Index index = policy.victim();
    if (index == kNone) return;
    // Its ancestors, which follow it, mostly lie before it.
    if (index >= kAhead) nodes_.prefetch_evicted(index - kAhead);
    move(index, tier, State::evicting);
    --counts_[tier].idle;
    count_in_parent(index, tier, false);
    chosen.push_back(nodes_.id(index));
  }
}

void BlockTrie::forget(std::span<const BlockId> blocks, std::size_t tier,
                       std::vector<Slot>& slots) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i + kAhead < blocks.size()) {
      const Index ahead = static_cast<Index>(blocks[i + kAhead]);
      if (ahead < nodes_.end()) table_.prefetch(nodes_[ahead].hash);
    }
    slots.push_back(leave(at(blocks[i]), tier));
  }
}

void BlockTrie::keep(BlockId block, std::size_t tier) {
  const Index index = at(block);
  move(index, tier, State::ready);
  ++counts_[tier].idle;
  count_in_parent(index, tier, true);
  review(index, tier);
}

std::optional<Slot> BlockTrie::lose(BlockId block, std::size_t tier) {
  const Index index = at(block);
  if (nodes_.standing(index, tier).leases > 0) return std::nullopt;
  move(index, tier, State::evicting);
  if (nodes_.residency(index, tier).queued) policies_[tier]->withdraw(index);
  --counts_[tier].idle;
  count_in_parent(index, tier, false);
  return leave(index, tier);
}

Slot BlockTrie::leave(Index index, std::size_t tier) {
  Residency& residency = nodes_.residency(index, tier);
  const State before = residency.state;
  move(index, tier, State::absent);
  const Slot slot = residency.slot;
  residency.slot = 0;
  nodes_.standing(index, tier).last_use = 0.0;
  --counts_[tier].held;
  if (before != State::evicting) count_in_parent(index, tier, false);
  prune(index);
  return slot;
}

bool BlockTrie::is_cached(Index index) const {
  for (std::size_t tier = 0; tier < nodes_.num_tiers(); ++tier)
    if (nodes_.residency(index, tier).state != State::absent) return true;
  return false;
}

void BlockTrie::prune(Index index) {
  while (nodes_.is_block(index) && nodes_[index].num_children == 0 && !is_cached(index)) {
    const Node& node = nodes_[index];
    const Index parent = node.parent;
    table_.erase(node.hash, index);
    if (!keys_.empty()) keys_.erase(index);
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
