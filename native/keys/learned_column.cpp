#include "keys/learned_column.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>

namespace kvtier::keys {

namespace {

constexpr std::size_t kUsualRoom = std::size_t{1} << 16;  // blocks, until it is known
constexpr std::uint64_t kSeed = 7;
constexpr std::size_t kFitShare = 16;  // the policy is told of room that differs by one in so many

// What so many blocks would be of `whole`, were `part` of them so many.
std::size_t in_proportion(std::size_t num_blocks, std::size_t part, std::size_t whole) {
  return whole == 0 ? num_blocks : num_blocks * part / whole;
}

}  // namespace

LearnedColumn::LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy)
    : known_(known),
      column_(column),
      live_(policy::make_live(policy, kUsualRoom, kSeed, *this)),
      room_(kUsualRoom),
      told_(kUsualRoom) {}

bool LearnedColumn::may_leave(Index row, std::uint32_t) const {
  Index member = row;
  do {
    const Standing& it = at(member);
    if (it.state != State::ready || it.num_leases > 0) return false;
    member = it.after;
  } while (member != row);
  return true;
}

Index LearnedColumn::row_named(policy::Key name) const {
  return known_.named(name, [this](Index row) { return at(row).is_linked; });
}

Index LearnedColumn::find(policy::Key name) const {
  const Index row = row_named(name);
  return row == kNone ? kNone : at(row).before;
}

Index LearnedColumn::number(Index row) const {
  const Standing& it = at(row);
  return it.is_linked ? it.before : kNone;
}

Index LearnedColumn::place(Index row) const {
  const Index its = number(row);
  return its != kNone || !known_.has_groups() ? its : find(known_.name(row));
}

Index LearnedColumn::in_front_of(Index row) const {
  const Index its = number(row);
  return its == kNone ? kNone : live_->in_front_of(its);
}

void LearnedColumn::enter(Index row, Index behind) {
  Standing& it = at(row);
  const policy::Key name = known_.name(row);
  const Index beside = known_.has_groups() ? row_named(name) : kNone;
  if (beside != kNone) {
    it.before = at(beside).before;
    it.after = at(beside).after;
    at(beside).after = row;
  } else {
    it.after = row;  // before the policy looks at it
    it.before = live_->entered(name, row, {}, behind);
  }
  it.is_linked = true;
  ++num_members_;
}

bool LearnedColumn::evict(std::vector<Index>& rows) {
  const Index first = live_->next_victim();
  if (first == kNone) return false;
  const auto num_before = static_cast<std::ptrdiff_t>(rows.size());
  Index row = first;
  do {
    at(row).is_linked = false;
    rows.push_back(row);
    --num_members_;
    row = at(row).after;
  } while (row != first);
  std::sort(rows.begin() + num_before, rows.end());
  return true;
}

void LearnedColumn::leave(Index row) {
  Standing& it = at(row);
  it.is_linked = false;
  --num_members_;
  if (it.after == row) return live_->left(it.before);
  Index in_front = it.after;
  while (at(in_front).after != row) in_front = at(in_front).after;
  at(in_front).after = it.after;
  live_->set_item(it.before, it.after);
  live_->let_go(it.before);  // it may have been what held the others
}

// -- numbers of blocks, and of places
// ---------------------------------------------------------------------------------------------

void LearnedColumn::set_room(std::size_t num_blocks) {
  room_ = num_blocks;
  told_ = 0;
  fit();
}

// The column has room for as many places as it would have with those that are here.
void LearnedColumn::fit() {
  const std::size_t places = in_proportion(room_, live_->num_blocks(), num_members_);
  const std::size_t room = std::max<std::size_t>(1, places);
  const std::size_t away = room > told_ ? room - told_ : told_ - room;
  if (told_ > 0 && away <= told_ / kFitShare) return;
  told_ = room;
  live_->set_capacity(room);
}

void LearnedColumn::asked(std::span<const policy::Key> path, std::span<const Index> found,
                          double now) {
  if (known_.has_groups()) fit();
  live_->asked(path, found, now);
}

void LearnedColumn::admit(std::span<const policy::Key> names, std::size_t num_free,
                          double least_chance, std::vector<std::uint32_t>& which) {
  if (known_.has_groups()) admit_places(names, num_free, least_chance, which);
  else live_->admit(names, num_free, least_chance, which);
}

void LearnedColumn::admit_places(std::span<const policy::Key> names, std::size_t num_free,
                                 double least_chance, std::vector<std::uint32_t>& which) {
  std::unordered_map<policy::Key, std::uint32_t> place_of;
  std::vector<policy::Key> places;
  std::vector<std::uint32_t> place(names.size(), kNone);  // kNone: it is here
  std::size_t num_new = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (row_named(names[i]) != kNone) continue;
    const auto number = static_cast<std::uint32_t>(places.size());
    const auto [known, is_first] = place_of.try_emplace(names[i], number);
    if (is_first) places.push_back(names[i]);
    place[i] = known->second;
    ++num_new;
  }
  num_free -= std::min(num_free, names.size() - num_new);
  std::vector<std::uint32_t> let_in;
  live_->admit(places, in_proportion(num_free, places.size(), num_new), least_chance, let_in);
  std::vector<bool> is_in(places.size());
  for (const std::uint32_t number : let_in) is_in[number] = true;
  for (std::uint32_t i = 0; i < names.size(); ++i)
    if (place[i] == kNone || is_in[place[i]]) which.push_back(i);
}

void LearnedColumn::check(std::size_t num_linked) const {
  trie::promise(num_linked == num_members_, "the policy has lost blocks");
  check_places();
  try {
    live_->check();
  } catch (const std::logic_error& error) {
    throw trie::BrokenPromise(error.what());
  }
}

void LearnedColumn::check_places() const {
  std::size_t num_places = 0;
  for (Index row = 0; row < known_.rows().end(); ++row) {
    if (!known_.rows().is_live(row) || !at(row).is_linked) continue;
    bool is_first = true;
    std::size_t num = 1;
    for (Index member = at(row).after; member != row; member = at(member).after) {
      trie::promise(num++ < num_members_, "a place that does not go round");
      trie::promise(at(member).is_linked && at(member).before == at(row).before &&
                        known_.name(member) == known_.name(row),
                    "a place has a block of another one");
      is_first &= row < member;
    }
    num_places += is_first;
  }
  trie::promise(num_places == live_->num_blocks(), "the policy has lost places");
}

}  // namespace kvtier::keys
