#include "keys/key_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace kvtier::keys {

namespace {

constexpr std::size_t kAhead = 16;  // blocks whose rows are fetched at a time
constexpr std::uint16_t kMaxLeases = 0xFFFF;

// Columns with an order have links, and all where blocks have groups.
std::vector<bool> have_links(std::span<const std::string_view> policies, bool has_groups) {
  std::vector<bool> have;
  for (const std::string_view policy : policies)
    have.push_back(has_groups || policy == policy::kLru);
  return have;
}

// Set of keys, with open addressing.
class NamedKeys {
 public:
  // num_keys: at most so many are added.
  explicit NamedKeys(std::size_t num_keys) : cells_(std::bit_ceil(2 * num_keys + 1)) {}

  // Adds a key. Returns whether it is new.
  bool add(const KeyIndex::Key& key, std::uint64_t hash) {
    const std::size_t mask = cells_.size() - 1;
    for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
      KeyIndex::Key& cell = cells_[at];
      if (cell.data == nullptr) {
        cell = key;
        return true;
      }
      if (cell.size == key.size && std::memcmp(cell.data, key.data, key.size) == 0) return false;
    }
  }

 private:
  std::vector<KeyIndex::Key> cells_;
};

}  // namespace

KeyIndex::KeyIndex(std::span<const std::string_view> policies, std::size_t group_bytes)
    : known_(have_links(policies, group_bytes > 0), group_bytes),
      rows_(known_.rows()),
      orders_(policies.size()) {
  for (std::size_t column = 0; column < policies.size(); ++column) {
    if (policies[column] == policy::kLru) continue;
    orders_[column].learned = std::make_unique<LearnedColumn>(known_, column, policies[column]);
  }
}

std::size_t KeyIndex::num_bytes() const {
  std::size_t sum = known_.num_bytes();
  for (const Order& order : orders_)
    if (order.learned) sum += order.learned->num_bytes();
  return sum;
}

void KeyIndex::find(std::span<const Key> keys, std::vector<Index>& rows) const {
  rows.resize(keys.size());
  known_.find(keys, [&](std::size_t i, Index row, std::uint64_t) { rows[i] = row; });
}

void KeyIndex::missing(std::span<const Key> keys, std::size_t column,
                       std::vector<std::uint32_t>& which, std::vector<BlockId>& ready) const {
  NamedKeys named(keys.size());
  known_.find(keys, [&](std::size_t i, Index row, std::uint64_t name) {
    const State state = row == kNone ? State::absent : state_at(row, column);
    if (state == State::ready) ready.push_back(rows_.id(row));
    if (state == State::absent && named.add(keys[i], known_.hash(keys[i], name)))
      which.push_back(static_cast<std::uint32_t>(i));
  });
}

void KeyIndex::leave_each_once(std::vector<Key>& keys) const {
  NamedKeys named(keys.size());
  std::erase_if(keys, [&](const Key& key) { return !named.add(key, known_.hash(key)); });
}

State KeyIndex::state(BlockId block, std::size_t column) const {
  return rows_.has(block) ? rows_.at(static_cast<Index>(block), column).state : State::absent;
}

// -- columns with a policy that knows requests
// ---------------------------------------------------------------------------------------------

// Adds a block to a column. A block that was in no request follows the same block as in another
// column, else `before`.
void KeyIndex::enter(Index row, std::size_t column, Index before, policy::Key name) {
  LearnedColumn& here = *orders_[column].learned;
  Index behind = kNone;
  for (std::size_t other = 0; other < orders_.size() && behind == kNone; ++other) {
    if (other == column || !orders_[other].learned) continue;
    const Index above = orders_[other].learned->in_front_of(row);
    if (above != kNone) behind = here.place(above);
  }
  if (behind == kNone && before != kNone) behind = here.place(before);
  here.enter(row, behind, name);
}

// Calls tell(column, path) for each learned column. path: the places of the prompt, or those that
// the column has or is expected to get. found_ has the first of them, as far as the column has a
// block of each.
template <typename Tell>
void KeyIndex::tell_of_prompt(std::span<const Key> keys, Tell&& tell) {
  names_.clear();
  asked_.resize(keys.size());
  ends_.clear();
  known_.find(keys, [&](std::size_t i, Index row, std::uint64_t name) {
    asked_[i] = row;
    if (names_.empty() || name != names_.back()) {
      names_.push_back(name);
      ends_.push_back(i);
    }
    ends_.back() = i + 1;
  });
  for (const Order& order : orders_) {
    if (!order.learned) continue;
    found_.clear();
    path_.clear();
    const bool has_gaps = num_last_ < ends_.size();
    std::size_t i = 0;
    for (std::size_t at = 0; at < ends_.size(); i = ends_[at++]) {
      Index place = kNone;
      for (; i < ends_[at] && place == kNone; ++i)
        if (asked_[i] != kNone && order.learned->has(asked_[i]))
          place = order.learned->place(asked_[i]);
      if (place == kNone && known_.has_groups()) place = order.learned->find(names_[at]);
      if (place == kNone && !has_gaps) break;
      if (place == kNone) {
        if (at + num_last_ >= ends_.size()) path_.push_back(names_[at]);
        continue;
      }
      if (has_gaps) {
        path_.resize(found_.size());
        path_.push_back(names_[at]);
      }
      found_.push_back(place);
    }
    const std::vector<policy::Key>& path = has_gaps ? path_ : names_;
    if (!path.empty()) tell(*order.learned, path);
  }
}

void KeyIndex::asked(std::span<const Key> keys, double now) {
  tell_of_prompt(keys, [&](LearnedColumn& column, std::span<const policy::Key> path) {
    column.asked(path, found_, now);
  });
}

void KeyIndex::retain(std::span<const Key> keys, const policy::BlockHint& said, double now) {
  tell_of_prompt(keys, [&](LearnedColumn& column, std::span<const policy::Key> path) {
    column.live().retain(path, found_, said, now);
  });
}

// By place, in order.
void KeyIndex::read_names(std::span<const Key> keys) {
  names_.clear();
  for (const Key key : keys)
    if (const std::uint64_t name = known_.name(key); names_.empty() || name != names_.back())
      names_.push_back(name);
}

void KeyIndex::continues(std::span<const Key> keys, Key before) {
  read_names(keys);
  for (const Order& order : orders_)
    if (order.learned) order.learned->live().continues(names_, known_.name(before));
}

void KeyIndex::admit(std::span<const Key> keys, std::size_t column, std::size_t num_free,
                     double least_chance, std::vector<std::uint32_t>& which) {
  names_.clear();
  for (const Key key : keys) names_.push_back(known_.name(key));
  if (orders_[column].learned) {
    orders_[column].learned->admit(names_, num_free, least_chance, which);
  } else {
    for (std::uint32_t i = 0; i < keys.size(); ++i) which.push_back(i);
  }
}

void KeyIndex::set_room(std::size_t column, std::size_t num_blocks) {
  if (orders_[column].learned) orders_[column].learned->set_room(num_blocks);
}

void KeyIndex::set_doubling(double doubles_at_blocks) {
  for (const Order& order : orders_)
    if (order.learned) order.learned->live().set_doubling(doubles_at_blocks);
}

void KeyIndex::expect(std::size_t num_blocks) {
  known_.expect(num_blocks);
  for (Order& order : orders_)
    if (order.learned) order.learned->live().expect(num_blocks);
}

void KeyIndex::evict_learned(std::size_t column, std::size_t num_blocks,
                             std::vector<BlockId>& chosen) {
  Order& order = orders_[column];
  order.learned->live().begin_evicting();
  leaving_.clear();
  while (leaving_.size() < num_blocks && order.learned->evict(leaving_)) continue;
  for (const Index at : leaving_) {
    rows_.at(at, column).state = State::evicting;
    --order.num_idle;
    chosen.push_back(rows_.id(at));
  }
}

// -- order of eviction
// ---------------------------------------------------------------------------------------------

void KeyIndex::link_first(Index row, std::size_t column) {
  Order& order = orders_[column];
  rows_.links(row, column) = {kNone, order.first};
  rows_.at(row, column).is_linked = true;
  (order.first == kNone ? order.last : rows_.links(order.first, column).before) = row;
  order.first = row;
}

void KeyIndex::link_last(Index row, std::size_t column) {
  Order& order = orders_[column];
  if (order.learned) return;
  rows_.links(row, column) = {order.last, kNone};
  rows_.at(row, column).is_linked = true;
  (order.last == kNone ? order.first : rows_.links(order.last, column).after) = row;
  order.last = row;
}

void KeyIndex::unlink(Index row, std::size_t column) {
  Order& order = orders_[column];
  if (order.learned) return;
  const auto [before, after] = rows_.links(row, column);
  (before == kNone ? order.first : rows_.links(before, column).after) = after;
  (after == kNone ? order.last : rows_.links(after, column).before) = before;
  rows_.at(row, column).is_linked = false;
}

// Links a skipped block again, as the next victim: blocks evicted meanwhile were used after it.
void KeyIndex::come_back(Index row, std::size_t column) {
  const Standing& it = rows_.at(row, column);
  if (it.state != State::ready || it.num_leases > 0) return;
  if (orders_[column].learned) orders_[column].learned->let_go(row);
  else if (!it.is_linked) link_first(row, column);
}

// -- writing
// ---------------------------------------------------------------------------------------------

void KeyIndex::move(Index row, std::size_t column, State to) {
  Standing& it = rows_.at(row, column);
  if (!trie::may_move(it.state, to))
    throw BrokenPromise(std::string("no move from ") + name(it.state) + " to " + name(to));
  promise(to == State::writing || to == State::ready || it.num_leases == 0,
          "a leased block may not leave a column");
  it.state = to;
}

void KeyIndex::make(std::span<const Key> keys, std::vector<BlockId>& blocks) {
  known_.make(
      keys, [](policy::Key) {},
      [&](std::size_t, Index row, policy::Key) { blocks.push_back(rows_.id(row)); });
}

void KeyIndex::begin_write(BlockId block, std::size_t column, Slot slot, Index before) {
  const Index at = row(block);
  begin_write(at, column, slot, before, orders_[column].learned ? known_.name(at) : 0);
}

void KeyIndex::begin_write(Index at, std::size_t column, Slot slot, Index before,
                           policy::Key name) {
  move(at, column, State::writing);
  rows_.at(at, column).slot = slot;
  rows_.at(at, column).was_used = false;
  ++orders_[column].num_held;
  if (orders_[column].learned) enter(at, column, before, name);
  link_last(at, column);
}

void KeyIndex::write_new(std::span<const Key> keys, std::size_t column,
                         std::span<const Slot> slots, std::vector<BlockId>& blocks,
                         std::vector<std::uint64_t>& hashes) {
  const LearnedColumn* const learned = orders_[column].learned.get();
  Index before = kNone;
  known_.make(
      keys,
      [&](policy::Key name) {
        if (learned != nullptr) learned->live().prefetch(name);
      },
      [&](std::size_t i, Index row, policy::Key name) {
        begin_write(row, column, slots[i], before, name);
        blocks.push_back(rows_.id(before = row));
        hashes.push_back(known_.hash(keys[i], name));
      });
  touch(blocks);
}

void KeyIndex::commit(BlockId block, std::size_t column) {
  const Index at = row(block);
  move(at, column, State::ready);
  Standing& it = rows_.at(at, column);
  orders_[column].num_idle += it.num_leases == 0;
  if (!it.was_used) {
    if (it.is_linked) unlink(at, column);
    link_last(at, column);
  }
  come_back(at, column);
}

Slot KeyIndex::leave(Index row, std::size_t column) {
  const State before = state_at(row, column);
  move(row, column, State::absent);
  Standing& it = rows_.at(row, column);
  const Slot slot = it.slot;
  orders_[column].num_idle -= before == State::ready;
  --orders_[column].num_held;
  if (it.is_linked && orders_[column].learned) {
    orders_[column].learned->leave(row);
  } else if (it.is_linked) {
    unlink(row, column);
  }
  bool is_cached = false;
  for (std::size_t each = 0; each < rows_.num_columns(); ++each)
    is_cached |= state_at(row, each) != State::absent;
  if (!is_cached) known_.drop(row);
  return slot;
}

// -- use
// ---------------------------------------------------------------------------------------------

void KeyIndex::touch(std::span<const BlockId> blocks) {
  for (std::size_t i = blocks.size(); i-- > 0;) {  // the first ones of a prompt are evicted last
    const Index at = row(blocks[i]);
    if (i >= kAhead) rows_.prefetch_block(blocks[i - kAhead]);
    ++rows_.num_uses(at);
    for (std::size_t column = 0; column < rows_.num_columns(); ++column) {
      Standing& it = rows_.at(at, column);
      if (it.state == State::absent || it.state == State::evicting) continue;
      it.was_used = true;
      if (it.is_linked) unlink(at, column);
      link_last(at, column);
    }
  }
}

void KeyIndex::lease(BlockId block, std::size_t column) {
  Standing& it = rows_.at(row(block), column);
  if (it.state != State::ready && it.state != State::writing)
    throw BrokenPromise(std::string("lease on a block that is ") + name(it.state));
  promise(it.num_leases < kMaxLeases, "a block is leased 65,535 times");
  if (it.num_leases++ == 0) orders_[column].num_idle -= it.state == State::ready;
}

void KeyIndex::release(BlockId block, std::size_t column) {
  const Index at = row(block);
  Standing& it = rows_.at(at, column);
  promise(it.num_leases > 0, "released more often than leased");
  if (--it.num_leases > 0) return;
  orders_[column].num_idle += it.state == State::ready;
  come_back(at, column);
}

void KeyIndex::release(std::span<const BlockId> blocks, std::size_t column) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i + kAhead < blocks.size()) rows_.prefetch_block(blocks[i + kAhead]);
    release(blocks[i], column);
  }
}

void KeyIndex::lease_ready(std::span<const Key> keys, std::size_t column, bool all_or_none,
                           std::vector<State>& states, std::vector<Slot>& slots) {
  Order& order = orders_[column];
  states.resize(keys.size());
  slots.clear();
  found_.clear();
  known_.find(keys, [&](std::size_t i, Index row, std::uint64_t) {
    states[i] = State::absent;
    if (row == kNone) return;
    Standing& it = rows_.at(row, column);
    states[i] = it.state;
    if (it.state != State::ready || (all_or_none && found_.size() < i)) return;
    promise(it.num_leases < kMaxLeases, "a block is leased 65,535 times");
    order.num_idle -= it.num_leases++ == 0;
    slots.push_back(it.slot);
    found_.push_back(row);
  });
  if (!all_or_none || slots.size() == keys.size()) return;
  for (const Index row : found_) order.num_idle += --rows_.at(row, column).num_leases == 0;
  slots.clear();
}

// -- eviction
// ---------------------------------------------------------------------------------------------

void KeyIndex::evict(std::size_t column, std::size_t num_blocks, std::vector<BlockId>& chosen) {
  Order& order = orders_[column];
  num_blocks = std::min(num_blocks, order.num_idle);
  if (order.learned) return evict_learned(column, num_blocks, chosen);
  while (num_blocks > 0 && order.first != kNone) {
    const Index at = order.first;
    Standing& it = rows_.at(at, column);
    unlink(at, column);
    if (order.first != kNone) rows_.prefetch(order.first);
    if (it.state != State::ready || it.num_leases > 0) continue;  // `come_back` links it again
    it.state = State::evicting;
    --order.num_idle;
    chosen.push_back(rows_.id(at));
    --num_blocks;
  }
}

void KeyIndex::forget(std::span<const BlockId> blocks, std::size_t column,
                      std::vector<Slot>& slots) {
  known_.for_each_dropped(
      blocks, [&](std::size_t i) { slots.push_back(leave(row(blocks[i]), column)); });
}

void KeyIndex::keep(BlockId block, std::size_t column) {
  const Index at = row(block);
  promise(state_at(at, column) == State::evicting, "only what is being evicted may be kept");
  move(at, column, State::ready);
  ++orders_[column].num_idle;
  if (orders_[column].learned) enter(at, column, kNone, known_.name(at));
  come_back(at, column);
}

std::optional<Slot> KeyIndex::lose(BlockId block, std::size_t column) {
  const Index at = row(block);
  if (rows_.at(at, column).num_leases > 0) return std::nullopt;
  move(at, column, State::evicting);
  --orders_[column].num_idle;
  return leave(at, column);
}

// -- for tests
// ---------------------------------------------------------------------------------------------

std::vector<Index> KeyIndex::order(std::size_t column) const {
  std::vector<Index> found;
  if (orders_[column].learned) {
    each([&](Index row) {
      if (rows_.at(row, column).is_linked) found.push_back(row);
    });
    return found;
  }
  for (Index at = orders_[column].first; at != kNone; at = rows_.links(at, column).after) {
    promise(found.size() <= rows_.num_live(), "the order of leaving goes round");
    found.push_back(at);
  }
  return found;
}

void KeyIndex::check_invariants() const {
  for (std::size_t column = 0; column < rows_.num_columns(); ++column) check_column(column);
  known_.check();
}

void KeyIndex::check_column(std::size_t column) const {
  std::size_t num_held = 0, num_idle = 0, num_linked = 0;
  each([&](Index row) {
    const Standing& it = rows_.at(row, column);
    const bool is_idle = it.state == State::ready && it.num_leases == 0;
    num_held += it.state != State::absent;
    num_idle += is_idle;
    num_linked += it.is_linked;
    promise(it.num_leases == 0 || it.state == State::ready || it.state == State::writing,
            "a block that is not there is leased");
    promise(!is_idle || it.is_linked, "a block that may leave is not in the order");
    promise(!it.is_linked || it.state == State::ready || it.state == State::writing,
            "a block that is not there is in the order");
  });
  promise(num_held == orders_[column].num_held, "blocks miscounted");
  promise(num_idle == orders_[column].num_idle, "idle blocks miscounted");
  if (orders_[column].learned) return orders_[column].learned->check(num_linked);
  Index before = kNone;
  for (const Index at : order(column)) {
    promise(rows_.links(at, column).before == before, "links disagree");
    before = at;
    --num_linked;
  }
  promise(num_linked == 0 && orders_[column].last == before, "the order has lost blocks");
}

}  // namespace kvtier::keys
