// Checks of all invariants, for tests and for a strict cache.
#include <unordered_set>

#include "trie/block_trie.hpp"

namespace kvtier::trie {

void BlockTrie::check_invariants() const {
  std::size_t num_live = 0;
  std::size_t num_roots = 0;
  each([&](Index index) {
    ++num_live;
    num_roots += nodes_[index].parent == kRoot;
    check_node(index);
  });
  promise(num_live == nodes_.num_live(), "nodes miscounted");
  promise(num_roots == roots_.size(), "roots miscounted");
  promise(num_live - num_roots == table_.size(),
          "the table knows more or fewer blocks than there are");
  for (std::size_t column = 0; column < nodes_.num_columns(); ++column) {
    check_column(column);
    if (const Column& it = columns_[column]; it.learned) it.learned->live().check();
    else it.queue.check();
  }
}

void BlockTrie::check_node(Index index) const {
  const Node& node = nodes_[index];
  if (node.parent == kRoot) {
    const Label space = label(index);
    const auto known =
        roots_.find(std::string(reinterpret_cast<const char*>(space.data), space.size));
    promise(known != roots_.end() && known->second == index, "a root that its namespace misses");
    promise(node.num_children > 0, "a root that nothing needs was not pruned");
    return;
  }
  promise(node.num_children > 0 || is_cached(index), "a node that nothing needs was not pruned");
  promise(node.parent < nodes_.end() && nodes_[node.parent].parent != kFree,
          "a block without a parent");
  promise(node.depth == nodes_[node.parent].depth + 1, "a block at the wrong depth");
  const Index root = nodes_.is_block(node.parent) ? nodes_.root(node.parent) : node.parent;
  promise(nodes_.root(index) == root, "a block under the wrong root");
  const Label mine = label(index);
  const Index found =
      table_.find(node.hash, [&](Index other) { return is_child(other, node.parent, mine); });
  promise(found == index, "a block that the table does not know");
}

void BlockTrie::check_column(std::size_t column) const {
  std::vector<std::uint32_t> known(nodes_.end(), 0);    // children of any state
  std::vector<std::uint32_t> staying(nodes_.end(), 0);  // children that need it in the column
  std::unordered_set<Slot> slots;
  std::size_t held = 0;
  std::size_t idle = 0;
  std::size_t queued = 0;
  each([&](Index index) {
    if (!nodes_.is_block(index)) return;
    const Residency& residency = nodes_.residency(index, column);
    const std::uint32_t leases = nodes_.standing(index, column).leases;
    const Index parent = nodes_[index].parent;
    ++known[parent];
    staying[parent] += residency.state == State::writing || residency.state == State::ready;
    queued += residency.queued;
    if (residency.state == State::absent) {
      promise(leases == 0, "a block that is not there is leased");
      return;
    }
    ++held;
    slots.insert(residency.slot);
    idle += residency.state == State::ready && leases == 0;
    promise(!nodes_.is_evictable(index, column) || residency.queued,
            "a candidate that its policy does not know");
  });
  promise(held == slots.size(), "two blocks share a slot");
  promise(held == columns_[column].held, "blocks miscounted");
  promise(idle == columns_[column].idle, "idle blocks miscounted");
  const Column& it = columns_[column];
  promise(queued == (it.learned ? it.learned->live().num_blocks() : it.queue.num_queued()),
          "a queue has more or fewer blocks than are marked");
  each([&](Index index) {
    promise(nodes_[index].num_children == known[index], "children miscounted");
    if (nodes_.is_block(index))
      promise(nodes_.standing(index, column).num_children == staying[index],
              "children in a column miscounted");
  });
}

}  // namespace kvtier::trie
