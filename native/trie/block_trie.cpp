#include "trie/block_trie.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "trie/hash.hpp"

namespace kvtier::trie {

namespace {

constexpr Index kAhead = 12;  // blocks between what is used and what is fetched into the cache

const char* name(State state) {
  switch (state) {
    case State::absent:
      return "ABSENT";
    case State::writing:
      return "WRITING";
    case State::ready:
      return "READY";
    case State::evicting:
      return "EVICTING";
  }
  return "?";
}

bool may_move(State from, State to) {
  switch (from) {
    case State::absent:
      return to == State::writing;
    case State::writing:
      return to == State::ready || to == State::absent;
    case State::ready:
      return to == State::evicting;
    case State::evicting:
      return to == State::ready || to == State::absent;
  }
  return false;
}

Label bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

BlockTrie::BlockTrie(std::span<const std::string_view> policies)
    : seed_(std::random_device{}()), nodes_(policies.size()), counts_(policies.size()) {
  seed_ = seed_ << 32 | std::random_device{}();
  for (std::size_t tier = 0; tier < policies.size(); ++tier) {
    policies_.push_back(make_policy(policies[tier], TierView(nodes_, tier)));
    promise(policies_.back() != nullptr, "a policy that the core does not have");
  }
}

// -- finding
// ------------------------------------------------------------------------------------------

Index BlockTrie::at(BlockId block) const {
  const Index index = static_cast<Index>(block);
  if (index >= nodes_.end() || !nodes_.is_block(index) || nodes_.id(index) != block)
    throw UnknownBlock(block);
  return index;
}

Index BlockTrie::root(std::string_view space) const {
  // Most calls are about the namespace of the call before.
  if (last_root_ != kNone && nodes_[last_root_].parent == kRoot) {
    const Label known = label(last_root_);
    if (known.size == space.size() && std::memcmp(known.data, space.data(), space.size()) == 0)
      return last_root_;
  }
  const auto found = roots_.find(std::string(space));
  return found == roots_.end() ? kNone : last_root_ = found->second;
}

bool BlockTrie::is_child(Index index, Index parent, Label label) const {
  const Label known = this->label(index);
  return nodes_[index].parent == parent && known.size == label.size &&
         std::memcmp(known.data, label.data, label.size) == 0;
}

Index BlockTrie::child(Index parent, Label label) {
  Node& above = nodes_[parent];
  if (above.num_children == 0) return kNone;
  const Index hint = above.hint;
  if (above.num_children == 1 && hint != kNone && is_child(hint, parent, label)) return hint;
  const std::uint64_t hash = prefix_hash(above.hash, label);
  const Index found = table_.find(hash, [&](Index index) {
    prefetch_path(index, index + kAhead);
    return is_child(index, parent, label);
  });
  if (found != kNone) above.hint = found;
  return found;
}

// Calls visit(block) for each block that there is below `index`, until it says no. Blocks of a path
// were mostly made together, and lie in the order in which they are asked for: then neither a hash
// nor a look-up is needed.
template <typename Visit>
void BlockTrie::walk(Index index, Labels& labels, Visit&& visit) {
  for (std::size_t i = 0; i < labels.size() && index != kNone;) {
    for (std::size_t num = nodes_.follow(index, labels.run(i)); num > 0; --num, ++i)
      if (!visit(++index)) return;
    if (i == labels.size()) return;
    index = child(index, labels[i++]);
    if (index != kNone && !visit(index)) return;
  }
}

// What lies behind a block is mostly what is asked for next.
void BlockTrie::prefetch_path(Index begin, Index end) const {
  end = std::min(end, nodes_.end());
  for (Index index = begin; index < end; ++index) nodes_.prefetch_walked(index);
}

Index BlockTrie::begin(std::string_view space, std::optional<BlockId> after) const {
  return after ? at(*after) : root(space);
}

void BlockTrie::match(std::string_view space, Labels& labels, std::vector<Found>& found) {
  walk(root(space), labels, [&](Index index) {
    const Residency* const residencies = nodes_.residencies(index);
    const bool arriving = residencies[0].state == State::writing;
    std::size_t tier = 0;
    while (tier < nodes_.num_tiers() && residencies[tier].state != State::ready) ++tier;
    if (tier == nodes_.num_tiers()) return false;
    found.push_back({nodes_.id(index), static_cast<std::uint8_t>(tier), arriving});
    return true;
  });
}

std::size_t BlockTrie::match_slots(std::string_view space, Labels& labels, std::size_t tier,
                                   std::int64_t* slots) {
  std::int64_t* next = slots;
  walk(root(space), labels, [&](Index index) {
    const Residency& residency = nodes_.residency(index, tier);
    if (residency.state != State::ready) return false;
    *next++ = residency.slot;
    return true;
  });
  return static_cast<std::size_t>(next - slots);
}

State BlockTrie::state(BlockId block, std::size_t tier) const {
  const Index index = static_cast<Index>(block);
  if (index >= nodes_.end() || !nodes_.is_block(index) || nodes_.id(index) != block)
    return State::absent;
  return nodes_.residency(index, tier).state;
}

void BlockTrie::states(std::string_view space, Labels& labels, std::size_t tier,
                       std::optional<BlockId> after, std::vector<State>& states) {
  walk(begin(space, after), labels, [&](Index index) {
    states.push_back(nodes_.residency(index, tier).state);
    return true;
  });
}

Slot BlockTrie::slot(BlockId block, std::size_t tier) const {
  return nodes_.residency(at(block), tier).slot;
}

std::vector<BlockId> BlockTrie::prefixes(std::span<const BlockId> blocks, std::size_t tier) const {
  std::vector<Index> below;
  for (const BlockId block : blocks) below.push_back(at(block));
  std::sort(below.begin(), below.end());
  std::vector<BlockId> found;
  for (const Index block : below) {
    Index above = nodes_[block].parent;
    while (nodes_.is_block(above) && !std::binary_search(below.begin(), below.end(), above)) {
      if (nodes_.residency(above, tier).state == State::ready) {
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
  for (const auto& policy : policies_) total += policy->num_bytes();
  return total + keys_.size() * (sizeof(Key) + 4 * sizeof(void*));
}

// -- writing
// ------------------------------------------------------------------------------------------

Index BlockTrie::make(Index parent, std::uint64_t hash, Label label) {
  const Index index = nodes_.allocate(label);
  Node& node = nodes_[index];
  node.hash = hash;
  node.parent = parent;
  node.hint = kNone;
  node.num_children = node.depth = 0;
  if (parent != kRoot) {
    node.depth = nodes_[parent].depth + 1;
    ++nodes_[parent].num_children;
    nodes_[parent].hint = index;
    table_.insert(hash, index);
  }
  return index;
}

// Nothing is known below a block that is missing: the hashes of what will be made can be computed,
// and their places in the table be on their way, before they are needed.
void BlockTrie::look_ahead(Index above, Labels& labels, std::size_t i) {
  ahead_.resize(labels.size());
  std::uint64_t hash = nodes_[above].hash;
  for (; i < labels.size(); ++i) {
    hash = prefix_hash(hash, labels[i]);
    ahead_[i] = hash;
    table_.prefetch(hash);
  }
}

Index BlockTrie::begin_or_make(std::string_view space, Labels& labels, std::optional<BlockId> after) {
  Index index = begin(space, after);
  if (index == kNone) {
    if (nodes_.end() == 0) nodes_.expect_labels(labels.usual_bytes());
    index = make(kRoot, prefix_hash(seed_, bytes_of(space)), bytes_of(space));
    roots_.emplace(space, index);
  }
  return index;
}

void BlockTrie::extend(std::string_view space, Labels& labels, std::optional<BlockId> after,
                       Path& path) {
  if (labels.size() == 0) return;  // a root without blocks would never be pruned
  labels.pack_all();
  Index index = begin_or_make(space, labels, after);
  bool is_known = true;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const Label label = labels[i];
    const Index known = is_known ? child(index, label) : kNone;
    if (is_known && known == kNone) look_ahead(index, labels, i);
    is_known = known != kNone;
    index = is_known ? known : make(index, ahead_[i], label);
    path.push_back(nodes_.id(index));
  }
}

std::size_t BlockTrie::insert(std::string_view space, Labels& labels, std::optional<BlockId> after,
                              std::size_t tier, std::span<Slot> slots, double now, bool hold,
                              Path& path) {
  if (labels.size() == 0) return 0;
  labels.pack_all();
  Index above = begin_or_make(space, labels, after);
  std::size_t num_new = 0;
  bool is_known = true;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const Label label = labels[i];
    Index index = is_known ? child(above, label) : kNone;
    if (is_known && index == kNone) look_ahead(above, labels, i);
    is_known = index != kNone;
    if (!is_known) index = make(above, ahead_[i], label);
    Residency& residency = nodes_.residency(index, tier);
    if (residency.state == State::ready) {
      slots[i] = residency.slot;
    } else if (residency.state == State::absent) {
      residency.state = State::ready;
      residency.slot = slots[i];
      nodes_.standing(index, tier).last_use = now;
      ++counts_[tier].held;
      ++counts_[tier].idle;
      if (nodes_.is_block(above)) ++nodes_.standing(above, tier).num_children;
      policies_[tier]->used(index);
      ++num_new;
    } else {
      break;
    }
    if (hold && nodes_.standing(index, tier).leases++ == 0) --counts_[tier].idle;
    path.push_back(nodes_.id(index));
    above = index;
  }
  // Of a path of new blocks only the last can be a leaf; the parent of the first was one perhaps,
  // and a queue notices by itself that it is none now. A block that was there before may have lost
  // its children since, but then it is queued.
  if (num_new > 0 && !hold) review(above, tier);
  return num_new;
}

void BlockTrie::move(Index index, std::size_t tier, State to) {
  Residency& residency = nodes_.residency(index, tier);
  if (!may_move(residency.state, to))
    throw BrokenPromise(std::string("no move from ") + name(residency.state) + " to " + name(to));
  promise(to == State::writing || to == State::ready || nodes_.standing(index, tier).leases == 0,
          "a leased block may not leave a tier");
  residency.state = to;
}

void BlockTrie::review(Index index, std::size_t tier) {
  if (nodes_.is_evictable(index, tier) && !nodes_.residency(index, tier).queued)
    policies_[tier]->offer(index);
}

void BlockTrie::count_in_parent(Index index, std::size_t tier, bool added) {
  const Index parent = nodes_[index].parent;
  if (!nodes_.is_block(parent)) return;
  nodes_.standing(parent, tier).num_children += added ? 1 : std::uint32_t(-1);
  review(parent, tier);
}

void BlockTrie::begin_write(BlockId block, std::size_t tier, Slot slot) {
  const Index index = at(block);
  move(index, tier, State::writing);
  nodes_.residency(index, tier).slot = slot;
  ++counts_[tier].held;
  count_in_parent(index, tier, true);
}

void BlockTrie::commit(BlockId block, std::size_t tier, double now) {
  const Index index = at(block);
  Standing& standing = nodes_.standing(index, tier);
  move(index, tier, State::ready);
  counts_[tier].idle += standing.leases == 0;
  standing.last_use = now;
  policies_[tier]->used(index);
  review(index, tier);
}

// -- use
// ----------------------------------------------------------------------------------------------

void BlockTrie::touch(BlockId block, double now) {
  const Index index = at(block);
  ++nodes_.num_uses(index);
  for (std::size_t tier = 0; tier < nodes_.num_tiers(); ++tier) {
    if (nodes_.residency(index, tier).state == State::absent) continue;
    nodes_.standing(index, tier).last_use = now;
    policies_[tier]->used(index);
  }
}

void BlockTrie::lease(BlockId block, std::size_t tier) {
  const Index index = at(block);
  const Residency& residency = nodes_.residency(index, tier);
  if (residency.state != State::ready && residency.state != State::writing)
    throw BrokenPromise(std::string("lease on a block that is ") + name(residency.state));
  if (nodes_.standing(index, tier).leases++ == 0)
    counts_[tier].idle -= residency.state == State::ready;
}

void BlockTrie::release(BlockId block, std::size_t tier) {
  const Index index = at(block);
  std::uint32_t& leases = nodes_.standing(index, tier).leases;
  promise(leases > 0, "released more often than leased");
  if (--leases > 0) return;
  counts_[tier].idle += nodes_.residency(index, tier).state == State::ready;
  review(index, tier);
}

// -- eviction
// -----------------------------------------------------------------------------------------

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

BlockTrie::Origin BlockTrie::origin(BlockId block) const {
  Index index = at(block);
  const std::uint32_t depth = nodes_[index].depth - 1;
  while (nodes_.is_block(index)) index = nodes_[index].parent;
  return {label(index), depth};
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

// -- keys
// ---------------------------------------------------------------------------------------------

std::string_view BlockTrie::missing_keys(BlockId block, std::vector<Unnamed>& missing) const {
  const auto text = [](const std::byte* data, std::size_t size) {
    return std::string_view(reinterpret_cast<const char*>(data), size);
  };
  Index index = at(block);
  for (; nodes_.is_block(index); index = nodes_[index].parent) {
    const auto known = keys_.find(index);
    if (known != keys_.end()) {
      std::reverse(missing.begin(), missing.end());
      return text(known->second.data(), known->second.size());
    }
    missing.push_back({nodes_.id(index), label(index)});
  }
  std::reverse(missing.begin(), missing.end());
  const Label space = label(index);
  return text(space.data, space.size);
}

void BlockTrie::set_key(BlockId block, const Key& key) { keys_[at(block)] = key; }

}  // namespace kvtier::trie
