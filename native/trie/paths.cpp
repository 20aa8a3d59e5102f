// Paths: finds the blocks of a prompt, and makes missing ones.
#include <algorithm>
#include <cstring>

#include "trie/block_trie.hpp"
#include "trie/hash.hpp"

namespace kvtier::trie {

namespace {

constexpr Index kAhead = 12;  // blocks that are fetched when the first of them is found

Label bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

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

// Calls visit(block) for each known block of the path below `index`, until it returns false. Blocks
// of a path were mostly made together, and lie in prompt order: then it needs neither a hash nor a
// look-up.
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

// Prefetches the nodes behind a block, which are mostly read next.
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
    while (tier < nodes_.num_columns() && residencies[tier].state != State::ready) ++tier;
    if (tier == nodes_.num_columns()) return false;
    found.push_back({nodes_.id(index), static_cast<std::uint8_t>(tier), arriving});
    return true;
  });
}

std::size_t BlockTrie::match_slots(std::string_view space, Labels& labels, std::size_t column,
                                   std::int64_t* slots) {
  std::int64_t* next = slots;
  walk(root(space), labels, [&](Index index) {
    const Residency& residency = nodes_.residency(index, column);
    if (residency.state != State::ready) return false;
    *next++ = residency.slot;
    return true;
  });
  return static_cast<std::size_t>(next - slots);
}

void BlockTrie::states(std::string_view space, Labels& labels, std::size_t column,
                       std::optional<BlockId> after, std::vector<State>& states) {
  walk(begin(space, after), labels, [&](Index index) {
    states.push_back(nodes_.residency(index, column).state);
    return true;
  });
}

Index BlockTrie::make(Index parent, std::uint64_t hash, Label label) {
  const Index index = nodes_.allocate(label);
  Node& node = nodes_[index];
  node.hash = hash;
  node.parent = parent;
  node.hint = kNone;
  node.num_children = node.depth = 0;
  nodes_.root(index) = index;
  if (parent != kRoot) {
    nodes_.root(index) = nodes_.root(parent);
    node.depth = nodes_[parent].depth + 1;
    ++nodes_[parent].num_children;
    nodes_[parent].hint = index;
    table_.insert(hash, index);
  }
  return index;
}

// Computes the hashes of the blocks that will be made, and prefetches their places in the table.
// All blocks below a missing block are missing.
void BlockTrie::look_ahead(Index above, Labels& labels, std::size_t i) {
  ahead_.resize(labels.size());
  std::uint64_t hash = nodes_[above].hash;
  for (; i < labels.size(); ++i) {
    hash = prefix_hash(hash, labels[i]);
    ahead_[i] = hash;
    table_.prefetch(hash);
  }
}

std::uint64_t BlockTrie::hash_of(std::string_view space) const {
  return prefix_hash(seed_, bytes_of(space));
}

Index BlockTrie::make_root(std::string_view space, Labels& labels) {
  if (nodes_.end() == 0) nodes_.expect_labels(labels.usual_bytes());
  const Index index = make(kRoot, hash_of(space), bytes_of(space));
  roots_.emplace(space, index);
  return index;
}

// Fills places_ with the known blocks until is_open(block) is false; if it never is, also with new
// blocks for the rest. Returns the place above them. There must be a label: a root without blocks
// would never be pruned.
template <typename Test>
Index BlockTrie::find_or_make(std::string_view space, Labels& labels, std::optional<BlockId> after,
                              Test&& is_open) {
  places_.clear();
  Index above = begin(space, after);
  bool all_open = true;
  walk(above, labels, [&](Index index) {
    all_open = is_open(index);
    if (all_open) places_.push_back(index);
    return all_open;
  });
  labels.pack_from(places_.size());
  if (above == kNone) above = make_root(space, labels);
  if (!all_open) return above;
  Index last = places_.empty() ? above : places_.back();
  look_ahead(last, labels, places_.size());
  for (std::size_t i = places_.size(); i < labels.size(); ++i)
    places_.push_back(last = make(last, ahead_[i], labels[i]));
  return above;
}

void BlockTrie::extend(std::string_view space, Labels& labels, std::optional<BlockId> after,
                       Path& path) {
  if (labels.size() == 0) return;
  find_or_make(space, labels, after, [](Index) { return true; });
  for (const Index index : places_) path.push_back(nodes_.id(index));
}

std::size_t BlockTrie::insert(std::string_view space, Labels& labels, std::optional<BlockId> after,
                              std::size_t column, std::span<Slot> slots, double now, bool hold,
                              Path& path) {
  if (labels.size() == 0) return 0;
  Index above = find_or_make(space, labels, after, [&](Index index) {
    const State state = nodes_.residency(index, column).state;
    return state == State::ready || state == State::absent;
  });
  std::size_t num_new = 0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Index index = places_[i];
    Residency& residency = nodes_.residency(index, column);
    Standing& standing = nodes_.standing(index, column);
    if (residency.state == State::ready) {
      slots[i] = residency.slot;
    } else {
      residency.state = State::ready;
      residency.slot = slots[i];
      standing.last_use = now;
      ++columns_[column].held;
      ++columns_[column].idle;
      if (nodes_.is_block(above)) ++nodes_.standing(above, column).num_children;
      enter(index, column);
      ++num_new;
    }
    if (hold && standing.leases++ == 0) --columns_[column].idle;
    path.push_back(nodes_.id(index));
    above = index;
  }
  // Leaves are evicted first, and only the last of a path of new blocks can be one. The parent of
  // the first may have been one; the queue notices by itself that it is none now. A block that was
  // known before may have lost its children since, but then it is queued.
  if (num_new > 0 && !hold) review(above, column);
  return num_new;
}

// -- requests
// ----------------------------------------------------------------------------------------------

// Calls tell(policy, path, found) for each column's policy that knows prompts.
template <typename Tell>
void BlockTrie::tell_of_prompt(std::string_view space, Labels& labels, Tell&& tell) {
  if (labels.size() == 0) return;
  if (std::ranges::none_of(columns_, [](const Column& it) { return it.learned != nullptr; }))
    return;
  places_.clear();
  walk(root(space), labels, [&](Index index) {
    places_.push_back(index);
    return true;
  });
  labels.pack_from(places_.size());
  ahead_.resize(labels.size());
  std::uint64_t hash = hash_of(space);
  for (std::size_t i = 0; i < labels.size(); ++i)
    ahead_[i] = hash = i < places_.size() ? nodes_[places_[i]].hash : prefix_hash(hash, labels[i]);
  for (std::size_t column = 0; column < columns_.size(); ++column) {
    if (!columns_[column].learned) continue;
    const auto is_gone = [&](Index index) {
      const State state = nodes_.residency(index, column).state;
      return state != State::writing && state != State::ready;
    };
    const auto end = std::find_if(places_.begin(), places_.end(), is_gone);
    const auto num_found = static_cast<std::size_t>(end - places_.begin());
    tell(columns_[column].learned->live(), std::span<const std::uint64_t>(ahead_),
         std::span<const Index>(places_).first(num_found));
  }
}

void BlockTrie::asked(std::string_view space, Labels& labels, double now) {
  tell_of_prompt(space, labels, [now](policy::Live& policy, auto path, auto found) {
    policy.asked(path, found, now);
  });
}

void BlockTrie::used_state(std::string_view space, Labels& labels, std::uint32_t num_before,
                           BlockId front, bool at_end, double now) {
  const std::uint64_t name = nodes_[at(front)].hash;
  tell_of_prompt(space, labels, [&](policy::Live& policy, auto path, auto found) {
    policy.used_state(path, found, num_before, name, at_end, now);
  });
}

void BlockTrie::retain(std::string_view space, Labels& labels, const policy::BlockHint& said,
                       double now) {
  policy::BlockHint of_tenant = said;
  of_tenant.tenant = std::hash<std::string_view>{}(space);  // a salt makes a namespace of its own
  tell_of_prompt(space, labels, [&](policy::Live& policy, auto path, auto found) {
    policy.retain(path, found, of_tenant, now);
  });
}

}  // namespace kvtier::trie
