// A column of the flat index where a policy decides that knows requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "keys/known_blocks.hpp"
#include "policy/keeper.hpp"
#include "policy/live.hpp"

namespace kvtier::keys {

// The policy knows every block that is written or ready by its row, and sees by itself which may
// leave: they all count as linked.
class LearnedColumn final : private policy::Keeper {
 public:
  // policy: one that `make_live` knows.
  LearnedColumn(KnownBlocks& known, std::size_t column, std::string_view policy);
  LearnedColumn(const LearnedColumn&) = delete;
  LearnedColumn& operator=(const LearnedColumn&) = delete;

  policy::Live& live() { return *live_; }
  const policy::Live& live() const { return *live_; }

  // Whether the policy knows it.
  bool has(Index row) const { return known_.rows().at(row, column_).is_linked; }
  // The row of the block in front of one, kNone where one of them is not there.
  Index in_front_of(Index row) const { return has(row) ? live_->in_front_of(row) : kNone; }

  // The column has a block. Where nobody has asked for it, it lies behind another row.
  void enter(Index row, Index behind);
  void let_go(Index row) { live_->let_go(row); }
  // The row of the block that leaves next, kNone where none may.
  Index evict();
  // A block is gone that was not evicted.
  void leave(Index row);

  // Throws BrokenPromise where it does not have `num_linked` blocks, or the policy disagrees with
  // itself. O(all blocks).
  void check(std::size_t num_linked) const;

 private:
  policy::Key key(Index row) const override { return known_.name(row); }
  void prefetch(Index row) const override { known_.rows().prefetch_standings(row); }
  bool may_leave(Index row, std::uint32_t num_gone) const override;
  Index find(policy::Key name) const override;

  KnownBlocks& known_;
  std::size_t column_;
  std::unique_ptr<policy::Live> live_;
};

}  // namespace kvtier::keys
