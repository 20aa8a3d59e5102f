// A column of the flat index where a policy decides that knows requests.
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

// The policy knows every block that is written or ready, and sees by itself which may leave: they
// all count as linked. To it a block is its *place* (see `Places`): those of several groups that lie
// at one leave together, when each of them may. So what a policy chooses does not depend on how many
// groups there are, or on which of them has no block at some places; its numbers of blocks are
// numbers of places.
class LearnedColumn final : private policy::Keeper {
 public:
  // policy: one that `make_live` knows.
  LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy);
  LearnedColumn(const LearnedColumn&) = delete;
  LearnedColumn& operator=(const LearnedColumn&) = delete;

  policy::Live& live() { return *live_; }
  const policy::Live& live() const { return *live_; }

  // With all that belongs to it.
  std::size_t num_bytes() const { return live_->num_bytes() + places_.num_bytes(); }

  // Whether the policy knows it.
  bool has(Index row) const { return at(row).is_linked; }
  // The place that a block has, or would have beside others; kNone where there is none.
  Index place(Index row) const;
  // The place with this name, kNone where there is none.
  Index find(policy::Key name) const override;
  // The row of a block in front of one, kNone where one of them is not there.
  Index in_front_of(Index row) const;

  // The column has a block. Where nobody has asked for it, it lies behind another place.
  void enter(Index row, Index behind);
  void let_go(Index row) { live_->let_go(places_.of(row)); }
  // Appends the rows of the place that leaves next. Returns whether there is one.
  bool evict(std::vector<Index>& rows);
  // A block is gone that was not evicted.
  void leave(Index row);

  void set_room(std::size_t num_blocks);
  // A request begins: the names of its places, and the first of these places, those that are here.
  void asked(std::span<const policy::Key> path, std::span<const Index> found, double now);
  // Which of these blocks, by their names, are worth their room; see `policy::Live::admit`. Those of
  // a place that is here are. Appends their positions.
  void admit(std::span<const policy::Key> names, std::size_t num_free, double least_chance,
             std::vector<std::uint32_t>& which);

  // Throws BrokenPromise where it does not have `num_linked` blocks, or the policy disagrees with
  // itself. O(all blocks).
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
  std::size_t num_members_ = 0;  // blocks that are here
  std::size_t room_;             // of the column, in blocks
  std::size_t told_;             // to the policy, in places
};

}  // namespace kvtier::keys
