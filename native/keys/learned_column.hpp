// A column of the flat index with a policy that knows requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "keys/known_blocks.hpp"
#include "keys/places.hpp"
#include "policy/keeper.hpp"
#include "policy/live.hpp"

namespace kvtier::keys {

// The policy knows every block that is being written or ready, and finds out by itself which ones
// can be evicted: they all count as linked. The policy works on *places* (see `Places`): blocks of
// several groups at one place are evicted together, when each of them can be. Its choices therefore
// do not depend on the number of groups, or on groups without a block at some places. Its numbers
// of blocks are numbers of places.
class LearnedColumn final : private policy::Keeper {
 public:
  // policy: one that `make_live` knows.
  LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy);
  LearnedColumn(const LearnedColumn&) = delete;
  LearnedColumn& operator=(const LearnedColumn&) = delete;

  policy::Live& live() { return *live_; }
  const policy::Live& live() const { return *live_; }

  // Return its size, with the policy.
  std::size_t num_bytes() const { return live_->num_bytes() + places_.num_bytes(); }

  // Whether the policy knows the block.
  bool has(Index row) const { return at(row).is_linked; }
  // Return the place of a block, or of other blocks with its name; kNone if there is none.
  Index place(Index row) const;
  // Return the place with this name; kNone if there is none.
  Index find(policy::Key name) const override;
  // Return the row of a block in front of this one; kNone if either is not in the column.
  Index in_front_of(Index row) const;

  // Report that the column has a block. behind: the place in front of it, for a block that was in
  // no request. name: of the block.
  void enter(Index row, Index behind, policy::Key name);
  void let_go(Index row) { live_->let_go(places_.of(row)); }
  // Evict the next place, and append its rows. Return whether there is one.
  bool evict(std::vector<Index>& rows);
  // Report that the owner has removed a block.
  void leave(Index row);

  void set_room(std::size_t num_blocks);
  // Report a request. path: names of its places. found: the first places, as far as they are here.
  void asked(std::span<const policy::Key> path, std::span<const Index> found, double now);
  // Append the positions of the blocks to admit; see `policy::Live::admit`. Blocks of a place that
  // is here are always admitted.
  void admit(std::span<const policy::Key> names, std::size_t num_free, double least_chance,
             std::vector<std::uint32_t>& which);

  // Throw BrokenPromise if it does not have `num_linked` blocks, or an invariant of the policy is
  // broken. O(all blocks).
  void check(std::size_t num_linked) const;

 private:
  policy::Key key(Index place) const override { return known_.name(places_.row(place)); }
  bool may_leave(Index place, std::uint32_t num_gone) const override;
  void prefetch(Index place) const override {
    if (!known_.has_groups()) known_.rows().prefetch(places_.row(place));
  }

  Standing& at(Index row) { return known_.rows().at(row, column_); }
  const Standing& at(Index row) const { return known_.rows().at(row, column_); }
  Index row_named(policy::Key name) const;
  void fit();
  void check_places() const;
  void admit_places(std::span<const policy::Key> names, std::size_t num_free, double least_chance,
                    std::vector<std::uint32_t>& which);

  KnownBlocks& known_;
  std::size_t column_;
  Places places_;
  std::unique_ptr<policy::Live> live_;
  std::size_t num_members_ = 0;  // blocks in the column
  std::size_t room_;             // of the column, in blocks
  std::size_t told_;             // capacity that was reported to the policy, in places
};

}  // namespace kvtier::keys
