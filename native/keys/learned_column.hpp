// A column of the flat index where a policy decides that knows requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "keys/known_blocks.hpp"
#include "policy/keeper.hpp"
#include "policy/live.hpp"

namespace kvtier::keys {

// The policy knows every block that is written or ready, and sees by itself which may leave: they
// all count as linked, and `before` of a block's standing is the policy's number of it.
//
// Blocks of several groups that have one name, for they lie at one place of a prompt, are one block
// to the policy, a *place*: they leave together, when each of them may. `after` goes round them. So
// what a policy chooses does not depend on how many groups there are, or on which of them has no
// block at some places; its numbers of blocks are numbers of places.
class LearnedColumn final : private policy::Keeper {
 public:
  // policy: one that `make_live` knows.
  LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy);
  LearnedColumn(const LearnedColumn&) = delete;
  LearnedColumn& operator=(const LearnedColumn&) = delete;

  policy::Live& live() { return *live_; }
  const policy::Live& live() const { return *live_; }

  // The policy's number of a block, kNone where the column does not have it.
  Index number(Index row) const;
  // The same of the place that it has, or would have.
  Index place(Index row) const;
  // The same of the place with this name.
  Index find(policy::Key name) const override;
  // A row of the place in front of a block's, kNone where one of them is not there.
  Index in_front_of(Index row) const;

  // The column has a block. Where nobody has asked for it, it lies behind the block of that number.
  void enter(Index row, Index behind);
  void let_go(Index row) { live_->let_go(number(row)); }
  // Appends the rows of the place that leaves next. Returns whether there is one.
  bool evict(std::vector<Index>& rows);
  // A block is gone that was not evicted.
  void leave(Index row);

  void set_room(std::size_t num_blocks);
  // A request begins: of its places the names, and the policy's numbers of the first ones.
  void asked(std::span<const policy::Key> path, std::span<const Index> found, double now);
  // Which of these blocks, by their names, are worth their room; see `policy::Live::admit`. Those of
  // a place that is here are. Appends their positions.
  void admit(std::span<const policy::Key> names, std::size_t num_free, double least_chance,
             std::vector<std::uint32_t>& which);

  // Throws BrokenPromise where it does not have `num_linked` blocks, or the policy disagrees with
  // itself. O(all blocks).
  void check(std::size_t num_linked) const;

 private:
  policy::Key key(Index row) const override { return known_.name(row); }
  bool may_leave(Index row, std::uint32_t num_gone) const override;

  Standing& at(Index row) { return known_.rows().at(row, column_); }
  const Standing& at(Index row) const { return known_.rows().at(row, column_); }
  Index row_named(policy::Key name) const;
  void fit();
  void check_places() const;
  void admit_places(std::span<const policy::Key> names, std::size_t num_free, double least_chance,
                    std::vector<std::uint32_t>& which);

  KnownBlocks& known_;
  std::size_t column_;
  std::unique_ptr<policy::Live> live_;
  std::size_t num_members_ = 0;  // blocks that are here
  std::size_t room_;             // of the column, in blocks
  std::size_t told_;             // to the policy, in places
};

}  // namespace kvtier::keys
