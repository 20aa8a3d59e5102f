#include "trie/block_trie.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "trie/hash.hpp"

namespace kvtier::trie {

BlockTrie::BlockTrie(std::span<const std::string_view> policies)
    : seed_(std::random_device{}()), nodes_(policies.size()) {
  seed_ = seed_ << 32 | std::random_device{}();
  for (const std::string_view policy : policies) {
    const ColumnView view(nodes_, columns_.size());
    columns_.push_back({Lru(view), nullptr});
    if (policy != policy::kLru) columns_.back().learned = std::make_unique<LivePolicy>(view, policy);
  }
}

Index BlockTrie::at(BlockId block) const {
  const Index index = static_cast<Index>(block);
  if (index >= nodes_.end() || !nodes_.is_block(index) || nodes_.id(index) != block)
    throw UnknownBlock(block);
  return index;
}

State BlockTrie::state(BlockId block, std::size_t column) const {
  const Index index = static_cast<Index>(block);
  if (index >= nodes_.end() || !nodes_.is_block(index) || nodes_.id(index) != block)
    return State::absent;
  return nodes_.residency(index, column).state;
}

Slot BlockTrie::slot(BlockId block, std::size_t column) const {
  return nodes_.residency(at(block), column).slot;
}

std::vector<BlockId> BlockTrie::prefixes(std::span<const BlockId> blocks,
                                         std::size_t column) const {
  std::vector<Index> below;
  for (const BlockId block : blocks) below.push_back(at(block));
  std::sort(below.begin(), below.end());
  std::vector<BlockId> found;
  for (const Index block : below) {
    Index above = nodes_[block].parent;
    while (nodes_.is_block(above) && !std::binary_search(below.begin(), below.end(), above)) {
      if (nodes_.residency(above, column).state == State::ready) {
        found.push_back(nodes_.id(above));
        break;
      }
      above = nodes_[above].parent;
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::size_t BlockTrie::num_bytes() const {
  std::size_t total = nodes_.num_bytes() + table_.num_bytes();
  for (const Column& it : columns_)
    total += it.learned ? it.learned->live().num_bytes() : it.queue.num_bytes();
  return total + keys_.num_bytes();
}

void BlockTrie::move(Index index, std::size_t column, State to) {
  Residency& residency = nodes_.residency(index, column);
  if (!may_move(residency.state, to))
    throw BrokenPromise(std::string("no move from ") + name(residency.state) + " to " + name(to));
  promise(to == State::writing || to == State::ready || nodes_.standing(index, column).leases == 0,
          "a leased block may not leave a column");
  residency.state = to;
}

void BlockTrie::review(Index index, std::size_t column) {
  if (!nodes_.is_evictable(index, column)) return;
  Column& it = columns_[column];
  if (it.learned) it.learned->live().let_go(index);
  else if (!nodes_.residency(index, column).queued) it.queue.offer(index);
}

void BlockTrie::enter(Index index, std::size_t column) {
  if (columns_[column].learned) columns_[column].learned->entered(index);
}

// A block is of no use without those before it, so a child keeps its parent.
void BlockTrie::count_in_parent(Index index, std::size_t column, bool added) {
  const Index parent = nodes_[index].parent;
  if (!nodes_.is_block(parent)) return;
  nodes_.standing(parent, column).num_children += added ? 1 : std::uint32_t(-1);
  review(parent, column);
}

void BlockTrie::begin_write(BlockId block, std::size_t column, Slot slot) {
  const Index index = at(block);
  move(index, column, State::writing);
  nodes_.residency(index, column).slot = slot;
  nodes_.standing(index, column).last_use = kNever;
  ++columns_[column].held;
  count_in_parent(index, column, true);
  enter(index, column);
}

void BlockTrie::commit(BlockId block, std::size_t column, double now) {
  const Index index = at(block);
  Standing& standing = nodes_.standing(index, column);
  move(index, column, State::ready);
  columns_[column].idle += standing.leases == 0;
  if (standing.last_use == kNever) standing.last_use = now;
  review(index, column);
}

// -- requests
// ----------------------------------------------------------------------------------------------

void BlockTrie::admit(std::span<const BlockId> blocks, std::size_t column, std::size_t num_free,
                      double least_chance, Path& admitted) {
  ahead_.clear();
  for (const BlockId block : blocks) ahead_.push_back(nodes_[at(block)].hash);
  Column& it = columns_[column];
  if (!it.learned) return admitted.assign(blocks.begin(), blocks.end());
  std::vector<std::uint32_t> which;
  it.learned->live().admit(ahead_, num_free, least_chance, which);
  for (const std::uint32_t i : which) admitted.push_back(blocks[i]);
}

// -- use
// ----------------------------------------------------------------------------------------------

void BlockTrie::touch(std::span<const BlockId> blocks, double now) {
  for (const BlockId block : blocks) {
    const Index index = at(block);
    ++nodes_.num_uses(index);
    for (std::size_t column = 0; column < nodes_.num_columns(); ++column) {
      if (nodes_.residency(index, column).state == State::absent) continue;
      nodes_.standing(index, column).last_use = now;
    }
  }
}

void BlockTrie::lease(BlockId block, std::size_t column) {
  const Index index = at(block);
  const Residency& residency = nodes_.residency(index, column);
  if (residency.state != State::ready && residency.state != State::writing)
    throw BrokenPromise(std::string("lease on a block that is ") + name(residency.state));
  if (nodes_.standing(index, column).leases++ == 0)
    columns_[column].idle -= residency.state == State::ready;
}

void BlockTrie::release(BlockId block, std::size_t column) {
  const Index index = at(block);
  std::uint32_t& leases = nodes_.standing(index, column).leases;
  promise(leases > 0, "released more often than leased");
  if (--leases > 0) return;
  columns_[column].idle += nodes_.residency(index, column).state == State::ready;
  review(index, column);
}

BlockTrie::Origin BlockTrie::origin(BlockId block) const {
  const Index index = at(block);
  return {label(nodes_.root(index)), nodes_[index].depth - 1};
}

// -- keys
// ---------------------------------------------------------------------------------------------

std::string_view BlockTrie::missing_keys(BlockId block, std::vector<Unnamed>& missing) const {
  const auto text = [](const std::byte* data, std::size_t size) {
    return std::string_view(reinterpret_cast<const char*>(data), size);
  };
  Index index = at(block);
  for (; nodes_.is_block(index); index = nodes_[index].parent) {
    if (const Key* const known = keys_.find(index, nodes_[index].generation)) {
      std::reverse(missing.begin(), missing.end());
      return text(known->data(), known->size());
    }
    missing.push_back({nodes_.id(index), label(index)});
  }
  std::reverse(missing.begin(), missing.end());
  const Label space = label(index);
  return text(space.data, space.size);
}

const BlockTrie::Key* BlockTrie::known_key(BlockId block) const {
  const Index index = at(block);
  return keys_.find(index, nodes_[index].generation);
}

void BlockTrie::set_key(BlockId block, const Key& key) {
  const Index index = at(block);
  keys_.set(index, nodes_[index].generation, key);
}

}  // namespace kvtier::trie
