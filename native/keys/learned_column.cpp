#include "keys/learned_column.hpp"

#include <algorithm>
#include <unordered_map>

namespace kvtier::keys {

namespace {

constexpr std::size_t kFitShare = 16;  // changes of the capacity below 1/16 are not reported

// Returns num_blocks * part / whole; num_blocks if `whole` is 0.
std::size_t in_proportion(std::size_t num_blocks, std::size_t part, std::size_t whole) {
  return whole == 0 ? num_blocks : num_blocks * part / whole;
}

}  // namespace

LearnedColumn::LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy)
    : known_(known),
      column_(column),
      places_(known.rows(), column, known.has_groups()),
      live_(policy::make_live(policy, *this)),
      room_(policy::kUsualRoom),
      told_(policy::kUsualRoom) {}

bool LearnedColumn::may_leave(Index place, std::uint32_t) const {
  return places_.all(place, [this](Index row) {
    return at(row).state == State::ready && at(row).num_leases == 0;
  });
}

Index LearnedColumn::row_named(policy::Key name) const {
  return known_.named(name, [this](Index row) { return at(row).is_linked; });
}

Index LearnedColumn::find(policy::Key name) const {
  const Index row = row_named(name);
  return row == kNone ? kNone : places_.of(row);
}

Index LearnedColumn::place(Index row) const {
  if (has(row)) return places_.of(row);
  return known_.has_groups() ? find(known_.name(row)) : kNone;
}

Index LearnedColumn::in_front_of(Index row) const {
  if (!has(row)) return kNone;
  const Index place = live_->in_front_of(places_.of(row));
  return place == kNone ? kNone : places_.row(place);
}

void LearnedColumn::enter(Index row, Index behind, policy::Key name) {
  const Index beside = known_.has_groups() ? row_named(name) : kNone;
  if (beside != kNone) places_.join(row, beside);
  else live_->entered(name, places_.make(row), {}, behind);
  at(row).is_linked = true;
  ++num_members_;
}

bool LearnedColumn::evict(std::vector<Index>& rows) {
  const Index place = live_->next_victim();
  if (place == kNone) return false;
  const auto num_before = static_cast<std::ptrdiff_t>(rows.size());
  places_.all(place, [&](Index row) {
    at(row).is_linked = false;
    rows.push_back(row);
    --num_members_;
    return true;
  });
  places_.remove(place);
  std::sort(rows.begin() + num_before, rows.end());
  return true;
}

void LearnedColumn::leave(Index row) {
  at(row).is_linked = false;
  --num_members_;
  const Index place = places_.of(row);
  if (places_.leave(row)) live_->let_go(place);  // it may have held the place
  else live_->left(place);
}

// -- numbers of blocks, and of places
// ---------------------------------------------------------------------------------------------

void LearnedColumn::set_room(std::size_t num_blocks) {
  room_ = num_blocks;
  told_ = 0;
  fit();
}

// Reports the capacity in places to the policy, from the current number of blocks per place.
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
  std::vector<std::uint32_t> place(names.size(), kNone);  // kNone: the place is here
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
  promise(num_linked == num_members_, "the policy has lost blocks");
  check_places();
  live_->check();
}

void LearnedColumn::check_places() const {
  std::size_t num_places = 0;
  for (Index row = 0; row < known_.rows().end(); ++row) {
    if (!known_.rows().is_live(row) || !has(row)) continue;
    const Index place = places_.of(row);
    bool is_first = true, is_there = false;
    std::size_t num = 0;
    places_.all(place, [&](Index member) {
      promise(num++ < num_members_, "a place that does not go round");
      promise(has(member) && places_.of(member) == place &&
                  known_.name(member) == known_.name(row),
              "a place has a block of another one");
      is_first &= row <= member;
      is_there |= row == member;
      return true;
    });
    promise(is_there, "a place has lost a block");
    num_places += is_first;
  }
  promise(num_places == live_->num_blocks(), "the policy has lost places");
}

}  // namespace kvtier::keys
