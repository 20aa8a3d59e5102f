#include "policy/ghosts.hpp"

namespace kvtier::policy {

void Ghosts::add(Index run, Index& ghost, Key key, std::uint32_t at) {
  if (ghost == kNone) {
    ghost = ghosts_.add({run, kNone, kNone, kNone});
    ages_.append(ghosts_, ghost);
  }
  if (const Index other = find_kept(key); other != kNone) lose(other);
  Ghost& it = ghosts_[ghost];
  it.first = keys_.add({key, ghost, at, it.first});
  cells_.insert(key, it.first);
}

// A ghost has few keys.
void Ghosts::lose(Index kept) {
  Index* link = &ghosts_[keys_[kept].ghost].first;
  while (*link != kept) link = &keys_[*link].next;
  *link = keys_[kept].next;
  cells_.erase(keys_[kept].key, [kept](Index other) { return other == kept; });
  keys_.remove(kept);
}

void Ghosts::drop(Index& ghost, std::uint32_t end) {
  if (ghost == kNone) return;
  for (Index kept = ghosts_[ghost].first; kept != kNone; kept = keys_[kept].next)
    cells_.prefetch(keys_[kept].key);
  for (Index kept = ghosts_[ghost].first; kept != kNone;) {
    const Index next = keys_[kept].next;
    if (keys_[kept].at < end) lose(kept);
    kept = next;
  }
  if (ghosts_[ghost].first != kNone) return;
  ages_.unlink(ghosts_, ghost);
  ghosts_.remove(ghost);
  ghost = kNone;
}

Ghosts::Found Ghosts::find(Key key) const {
  const Index kept = find_kept(key);
  if (kept == kNone) return {kNone, 0};
  return {ghosts_[keys_[kept].ghost].run, keys_[kept].at};
}

std::size_t Ghosts::num_keys(Index ghost) const {
  std::size_t num = 0;
  if (ghost == kNone) return num;
  for (Index kept = ghosts_[ghost].first; kept != kNone; kept = keys_[kept].next) ++num;
  return num;
}

}  // namespace kvtier::policy
