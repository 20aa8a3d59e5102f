// Evicted blocks, remembered by a few of their keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// A ghost is the evicted part of a run; its age is that of its first key. An entry is a key, or a
// ghost. The run stores the number of its ghost, kNone while it has none.
class Ghosts {
 public:
  struct Found {
    Index run;         // kNone if the key is not kept
    std::uint32_t at;  // place in the path
  };

  // Keeps the key of the run's block. It is taken from another run that had it, whose ghost may be
  // left without keys.
  void add(Index run, Index& ghost, Key key, std::uint32_t at);
  // Drops the keys of places before `end`, and the ghost if none is left.
  void drop(Index& ghost, std::uint32_t end);
  Found find(Key key) const;
  void prefetch(Key key) const { cells_.prefetch(key); }

  // Returns the run whose ghost is the oldest; kNone if there is none.
  Index oldest() const { return ages_.oldest == kNone ? kNone : ghosts_[ages_.oldest].run; }
  std::size_t num_entries() const { return keys_.size() + ghosts_.size(); }
  std::size_t num_bytes() const {
    return keys_.num_bytes() + ghosts_.num_bytes() + cells_.num_bytes();
  }

  // The keys of a ghost, for tests.
  std::size_t num_keys(Index ghost) const;

 private:
  struct Kept {
    Key key;
    Index ghost;
    std::uint32_t at;
    Index next;  // of the same ghost
  };
  struct Ghost {
    Index run;
    Index first;  // key
    Index older, newer;
  };

  Index find_kept(Key key) const {
    return cells_.find(key, [&](Index kept) { return keys_[kept].key == key; });
  }
  void lose(Index kept);

  Pool<Kept> keys_;
  Pool<Ghost> ghosts_;
  Cells<std::uint32_t> cells_;
  Ages ages_;
};

}  // namespace kvtier::policy
