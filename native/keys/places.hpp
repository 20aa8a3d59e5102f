// What a policy calls blocks that engines name by keys.
#pragma once

#include <cstddef>

#include "keys/key_rows.hpp"
#include "policy/pool.hpp"

namespace kvtier::keys {

// Of one column. Blocks of several groups that have one name lie at one *place* of a prompt, and are
// one to the policy: a ring of rows, in which a place is a block's `before`, and `after` goes round.
// Without groups a place is a row.
class Places {
 public:
  Places(KeyRows& rows, std::size_t column, bool has_groups)
      : rows_(rows), column_(column), has_groups_(has_groups) {}

  // Of a block that is in one.
  Index of(Index row) const { return has_groups_ ? links(row).before : row; }
  // Of a block that is there.
  Index row(Index place) const { return has_groups_ ? first_[place] : place; }
  // Calls visit(row) for each block that is there, until it returns false. Returns whether all did.
  template <typename Visit>
  bool all(Index place, Visit&& visit) const {
    const Index first = row(place);
    Index at = first;
    do {
      if (!visit(at)) return false;
      if (has_groups_) at = links(at).after;
    } while (at != first);
    return true;
  }
  std::size_t num_bytes() const { return first_.num_bytes(); }

  // A new place, for one block.
  Index make(Index row) {
    if (!has_groups_) return row;
    const Index place = first_.add(row);
    links(row) = {place, row};
    return place;
  }
  // A block comes to where another one is.
  void join(Index row, Index beside) {
    links(row) = links(beside);
    links(beside).after = row;
  }
  // A block goes. Returns whether others stay.
  bool leave(Index row) {
    if (!has_groups_) return false;
    const auto [place, after] = links(row);
    if (after == row) {
      first_.remove(place);
      return false;
    }
    Index in_front = after;
    while (links(in_front).after != row) in_front = links(in_front).after;
    links(in_front).after = after;
    first_[place] = after;
    return true;
  }
  // All of its blocks go.
  void remove(Index place) {
    if (has_groups_) first_.remove(place);
  }

 private:
  Links& links(Index row) { return rows_.links(row, column_); }
  const Links& links(Index row) const { return rows_.links(row, column_); }

  KeyRows& rows_;
  std::size_t column_;
  bool has_groups_;
  policy::Pool<Index> first_;  // by place: a row
};

}  // namespace kvtier::keys
