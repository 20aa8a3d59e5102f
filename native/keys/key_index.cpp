#include "keys/key_index.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "trie/hash.hpp"

namespace kvtier::keys {

using trie::BrokenPromise;
using trie::promise;
using trie::UnknownBlock;

namespace {

constexpr std::size_t kAhead = 16;  // blocks whose rows are fetched at a time
constexpr std::uint16_t kMaxLeases = 0xFFFF;
constexpr std::size_t kMaxKeyBytes = 256;
constexpr std::size_t kUsualRoom = std::size_t{1} << 16;  // blocks, until it is known
constexpr std::uint64_t kPolicySeed = 7;

}  // namespace

KeyIndex::KeyIndex(const std::vector<bool>& learns, std::string_view policy)
    : seed_(std::random_device{}()), rows_(learns.size()), orders_(learns.size()) {
  seed_ = seed_ << 32 | std::random_device{}();
  for (std::size_t column = 0; column < learns.size(); ++column)
    if (learns[column]) orders_[column].learning = std::make_unique<Learning>(*this, column, policy);
}

std::size_t KeyIndex::num_bytes() const {
  std::size_t sum = rows_.num_bytes() + cells_.num_bytes();
  for (const Order& order : orders_)
    if (order.learning) sum += order.learning->live->num_bytes();
  return sum;
}

// -- rows
// ---------------------------------------------------------------------------------------------

Index KeyIndex::row(BlockId block) const {
  if (!rows_.has(block)) throw UnknownBlock(block);
  return static_cast<Index>(block);
}

std::uint64_t KeyIndex::hash_of(Key key) const { return trie::prefix_hash(seed_, key); }

auto KeyIndex::row_hash() const {
  return [this](Index row) { return hash_of({rows_.key(row), rows_.key_bytes()}); };
}

Index KeyIndex::find_row(std::uint64_t hash, Key key) const {
  return cells_.find(hash, [&](Index row) {
    return std::memcmp(rows_.key(row), key.data, rows_.key_bytes()) == 0;
  });
}

template <typename Visit>
void KeyIndex::for_each(std::span<const Key> keys, Visit&& visit) const {
  cells_.for_each(
      keys.size(), [&](std::size_t i) { return hash_of(keys[i]); },
      [&](Index row) { rows_.prefetch(row); }, visit);
}

void KeyIndex::find(std::span<const Key> keys, std::vector<Index>& rows) const {
  rows.assign(keys.size(), kNone);
  for_each(keys, [&](std::size_t i, std::uint64_t hash) {
    if (keys[i].size == rows_.key_bytes()) rows[i] = find_row(hash, keys[i]);
  });
}

void KeyIndex::check_key(Key key) const {
  if (key.size == 0 || key.size > kMaxKeyBytes)
    throw std::invalid_argument("a key has 1 to 256 bytes, not " + std::to_string(key.size));
  if (rows_.key_bytes() > 0 && key.size != rows_.key_bytes())
    throw std::invalid_argument("a key has " + std::to_string(key.size) +
                                " bytes, those before it " + std::to_string(rows_.key_bytes()));
}

void KeyIndex::expect(std::size_t num_blocks) {
  cells_.reserve(num_blocks, 0.5, row_hash());  // where cells are free searches are short
}

void KeyIndex::make(std::span<const Key> keys, std::vector<BlockId>& blocks) {
  for_each(keys, [&](std::size_t i, std::uint64_t hash) {
    check_key(keys[i]);
    if (rows_.key_bytes() == 0) rows_.set_key_bytes(keys[i].size);
    Index row = find_row(hash, keys[i]);
    if (row == kNone) {
      row = rows_.allocate(keys[i].data);
      cells_.insert(hash, row, row_hash());
    }
    blocks.push_back(rows_.id(row));
  });
}

State KeyIndex::state(BlockId block, std::size_t column) const {
  return rows_.has(block) ? rows_.at(static_cast<Index>(block), column).state : State::absent;
}

// -- where a policy knows requests
// ---------------------------------------------------------------------------------------------

KeyIndex::Learning::Learning(const KeyIndex& index, std::size_t column, std::string_view name)
    : index(index),
      column(column),
      live(policy::make_live(name, kUsualRoom, kPolicySeed, *this)) {}

policy::Key KeyIndex::Learning::key(Index row) const { return index.row_hash()(row); }

bool KeyIndex::Learning::may_leave(Index row, std::uint32_t) const {
  const Standing& it = index.rows_.at(row, column);
  return it.state == State::ready && it.num_leases == 0;
}

Index KeyIndex::Learning::find(policy::Key name) const {
  const auto is_it = [&](Index row) { return index.row_hash()(row) == name; };
  const Index row = index.cells_.find(name, is_it);
  if (row == kNone) return kNone;
  const Standing& it = index.rows_.at(row, column);
  return it.is_linked ? it.before : kNone;
}

// Where nobody has asked for it, it lies behind what it lies behind elsewhere.
void KeyIndex::enter(Index row, std::size_t column) {
  Learning& mine = *orders_[column].learning;
  Index behind = kNone;
  for (std::size_t other = 0; other < orders_.size() && behind == kNone; ++other) {
    if (other == column || !orders_[other].learning || !rows_.at(row, other).is_linked) continue;
    const Index above = orders_[other].learning->live->in_front_of(rows_.at(row, other).before);
    if (above != kNone && rows_.at(above, column).is_linked) behind = rows_.at(above, column).before;
  }
  Standing& it = rows_.at(row, column);
  it.before = mine.live->entered(row_hash()(row), row, {}, behind);
  it.is_linked = true;
}

// Calls tell(policy) for each column that learns; names_ has the prompt, found_ what is there of it.
template <typename Tell>
void KeyIndex::tell_of_prompt(std::span<const Key> keys, Tell&& tell) {
  names_.resize(keys.size());
  std::vector<Index> rows(keys.size(), kNone);
  for_each(keys, [&](std::size_t i, std::uint64_t hash) {
    names_[i] = hash;
    if (keys[i].size == rows_.key_bytes()) rows[i] = find_row(hash, keys[i]);
  });
  for (std::size_t column = 0; column < orders_.size(); ++column) {
    if (!orders_[column].learning) continue;
    found_.clear();
    for (const Index row : rows) {
      if (row == kNone || !rows_.at(row, column).is_linked) break;
      found_.push_back(rows_.at(row, column).before);
    }
    tell(*orders_[column].learning->live);
  }
}

void KeyIndex::asked(std::span<const Key> keys, double now) {
  tell_of_prompt(keys, [&](policy::Live& live) { live.asked(names_, found_, now); });
}

void KeyIndex::retain(std::span<const Key> keys, const policy::Said& said, double now) {
  tell_of_prompt(keys, [&](policy::Live& live) { live.retain(names_, found_, said, now); });
}

void KeyIndex::continues(std::span<const Key> keys, Key before) {
  names_.clear();
  for (const Key key : keys) names_.push_back(hash_of(key));
  for (const Order& order : orders_)
    if (order.learning) order.learning->live->continues(names_, hash_of(before));
}

void KeyIndex::admit(std::span<const Key> keys, std::size_t column, std::size_t num_free,
                     double least_chance, std::vector<std::uint32_t>& which) {
  names_.clear();
  for (const Key key : keys) names_.push_back(hash_of(key));
  if (orders_[column].learning) {
    orders_[column].learning->live->admit(names_, num_free, least_chance, which);
  } else {
    for (std::uint32_t i = 0; i < keys.size(); ++i) which.push_back(i);
  }
}

void KeyIndex::set_room(std::size_t column, std::size_t num_blocks) {
  if (orders_[column].learning) orders_[column].learning->live->set_capacity(num_blocks);
}

void KeyIndex::set_doubling(double doubles_at_blocks) {
  for (const Order& order : orders_)
    if (order.learning) order.learning->live->set_doubling(doubles_at_blocks);
}

void KeyIndex::evict_learned(std::size_t column, std::size_t num_blocks,
                             std::vector<BlockId>& chosen) {
  Order& order = orders_[column];
  order.learning->live->begin_evicting();
  for (; num_blocks > 0; --num_blocks) {
    const Index at = order.learning->live->next_victim();
    if (at == kNone) return;
    Standing& it = rows_.at(at, column);
    it.is_linked = false;
    it.state = State::evicting;
    --order.num_idle;
    chosen.push_back(rows_.id(at));
  }
}

// -- the order of leaving
// ---------------------------------------------------------------------------------------------

void KeyIndex::link_first(Index row, std::size_t column) {
  Order& order = orders_[column];
  Standing& it = rows_.at(row, column);
  it.before = kNone;
  it.after = order.first;
  it.is_linked = true;
  (order.first == kNone ? order.last : rows_.at(order.first, column).before) = row;
  order.first = row;
}

void KeyIndex::link_last(Index row, std::size_t column) {
  Order& order = orders_[column];
  if (order.learning) return;
  Standing& it = rows_.at(row, column);
  it.before = order.last;
  it.after = kNone;
  it.is_linked = true;
  (order.last == kNone ? order.first : rows_.at(order.last, column).after) = row;
  order.last = row;
}

void KeyIndex::unlink(Index row, std::size_t column) {
  Order& order = orders_[column];
  Standing& it = rows_.at(row, column);
  if (order.learning) return;
  (it.before == kNone ? order.first : rows_.at(it.before, column).after) = it.after;
  (it.after == kNone ? order.last : rows_.at(it.after, column).before) = it.before;
  it.is_linked = false;
}

// A block that was passed over leaves next: those that left meanwhile were used after it.
void KeyIndex::come_back(Index row, std::size_t column) {
  const Standing& it = rows_.at(row, column);
  if (it.state != State::ready || it.num_leases > 0) return;
  if (orders_[column].learning) orders_[column].learning->live->let_go(it.before);
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

void KeyIndex::begin_write(BlockId block, std::size_t column, Slot slot) {
  const Index at = row(block);
  move(at, column, State::writing);
  rows_.at(at, column).slot = slot;
  rows_.at(at, column).was_used = false;
  ++orders_[column].num_held;
  if (orders_[column].learning) enter(at, column);
  link_last(at, column);
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
  if (it.is_linked && orders_[column].learning) {
    orders_[column].learning->live->left(it.before);
    it.is_linked = false;
  } else if (it.is_linked) {
    unlink(row, column);
  }
  bool is_cached = false;
  for (std::size_t each = 0; each < rows_.num_columns(); ++each)
    is_cached |= state_at(row, each) != State::absent;
  if (!is_cached) {
    cells_.erase(row_hash()(row), [row](Index other) { return other == row; }, row_hash());
    rows_.free(row);
  }
  return slot;
}

// -- use
// ---------------------------------------------------------------------------------------------

void KeyIndex::touch(std::span<const BlockId> blocks) {
  for (std::size_t i = blocks.size(); i-- > 0;) {  // the first ones of a prompt leave last
    const Index at = row(blocks[i]);
    if (i >= kAhead && rows_.has(blocks[i - kAhead]))
      rows_.prefetch(static_cast<Index>(blocks[i - kAhead]));
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

// -- eviction
// ---------------------------------------------------------------------------------------------

void KeyIndex::evict(std::size_t column, std::size_t num_blocks, std::vector<BlockId>& chosen) {
  Order& order = orders_[column];
  num_blocks = std::min(num_blocks, order.num_idle);
  if (order.learning) return evict_learned(column, num_blocks, chosen);
  while (num_blocks > 0 && order.first != kNone) {
    const Index at = order.first;
    Standing& it = rows_.at(at, column);
    unlink(at, column);
    if (order.first != kNone) rows_.prefetch(order.first);
    if (it.state != State::ready || it.num_leases > 0) continue;  // it will come back
    it.state = State::evicting;
    --order.num_idle;
    chosen.push_back(rows_.id(at));
    --num_blocks;
  }
}

void KeyIndex::keep(BlockId block, std::size_t column) {
  const Index at = row(block);
  promise(state_at(at, column) == State::evicting, "only what is being evicted may be kept");
  move(at, column, State::ready);
  ++orders_[column].num_idle;
  if (orders_[column].learning) enter(at, column);
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
  if (orders_[column].learning) {
    each([&](Index row) {
      if (rows_.at(row, column).is_linked) found.push_back(row);
    });
    return found;
  }
  for (Index at = orders_[column].first; at != kNone; at = rows_.at(at, column).after) {
    promise(found.size() <= rows_.num_live(), "the order of leaving goes round");
    found.push_back(at);
  }
  return found;
}

void KeyIndex::check_invariants() const {
  for (std::size_t column = 0; column < rows_.num_columns(); ++column) check_column(column);
  each([&](Index row) {
    promise(find_row(row_hash()(row), {rows_.key(row), rows_.key_bytes()}) == row,
            "a block that is not found by its key");
  });
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
  if (const auto& learning = orders_[column].learning) {
    promise(num_linked == learning->live->num_blocks(), "the policy has lost blocks");
    try {
      learning->live->check();
    } catch (const std::logic_error& error) {
      throw BrokenPromise(error.what());
    }
    return;
  }
  Index before = kNone;
  for (const Index at : order(column)) {
    promise(rows_.at(at, column).before == before, "links disagree");
    before = at;
    --num_linked;
  }
  promise(num_linked == 0 && orders_[column].last == before, "the order has lost blocks");
}

}  // namespace kvtier::keys
