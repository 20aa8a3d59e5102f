#include "keys/learned_column.hpp"

#include <stdexcept>

namespace kvtier::keys {

namespace {

constexpr std::size_t kUsualRoom = std::size_t{1} << 16;  // blocks, until it is known
constexpr std::uint64_t kSeed = 7;

}  // namespace

LearnedColumn::LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy)
    : known_(known),
      column_(column),
      live_(policy::make_live(policy, kUsualRoom, kSeed, *this)) {}

bool LearnedColumn::may_leave(Index row, std::uint32_t) const {
  const Standing& it = known_.rows().at(row, column_);
  return it.state == State::ready && it.num_leases == 0;
}

Index LearnedColumn::find(policy::Key name) const {
  const Index row = known_.named(name);
  return row == kNone || !has(row) ? kNone : row;
}

void LearnedColumn::enter(Index row, Index behind) {
  live_->entered(known_.name(row), row, {}, behind);
  known_.rows().at(row, column_).is_linked = true;
}

Index LearnedColumn::evict() {
  const Index row = live_->next_victim();
  if (row != kNone) known_.rows().at(row, column_).is_linked = false;
  return row;
}

void LearnedColumn::leave(Index row) {
  live_->left(row);
  known_.rows().at(row, column_).is_linked = false;
}

void LearnedColumn::check(std::size_t num_linked) const {
  trie::promise(num_linked == live_->num_blocks(), "the policy has lost blocks");
  try {
    live_->check();
  } catch (const std::logic_error& error) {
    throw trie::BrokenPromise(error.what());
  }
}

}  // namespace kvtier::keys
