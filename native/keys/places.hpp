// Places: the units in which a policy sees blocks that engines name by keys.
#pragma once

#include <cstddef>

#include "keys/key_rows.hpp"
#include "policy/pool.hpp"

namespace kvtier::keys {

// Places of one column. Blocks of several groups with the same name lie at one *place* of a prompt,
// and are one unit for the policy. They form a ring of rows: `before` is the place of a block, and
// `after` the next block of the ring. Without groups a place is a row.
class Places {
 public:
  Places(KeyRows& rows, std::size_t column, bool has_groups)
      : rows_(rows), column_(column), has_groups_(has_groups) {}

  // Return the place of a block.
  Index of(Index row) const { return has_groups_ ? links(row).before : row; }
  // Return the row of a block at a place.
  Index row(Index place) const { return has_groups_ ? first_[place] : place; }
  // Call visit(row) for each block at a place, until it returns false. Return whether it never did.
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

  // Make a place for one block.
  Index make(Index row) {
    if (!has_groups_) return row;
    const Index place = first_.add(row);
    links(row) = {place, row};
    return place;
  }
  // Add a block to the place of another one.
  void join(Index row, Index beside) {
    links(row) = links(beside);
    links(beside).after = row;
  }
  // Remove a block from its place. Return whether others stay there.
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
  // Remove a place with all of its blocks.
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
