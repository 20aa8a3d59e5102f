// The learned policy: it works on runs of blocks, and learns when they are used again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/blocks.hpp"
#include "policy/ghosts.hpp"
#include "policy/guard.hpp"
#include "policy/keeper.hpp"
#include "policy/reuse.hpp"
#include "policy/runs.hpp"

namespace kvtier::policy {

// A request takes its blocks out of the runs that it uses again. Its path becomes new runs: one for
// the blocks of each earlier run, one for the new blocks, and one for the last block alone, since
// an answer follows it. The policy learns, per class of runs, when they are used again. It evicts
// blocks from the end of the run of the least value, and admits a new block only if it is worth
// more than its victim. A request's own blocks are never evicted for its later ones.
//
// Retention hints give runs levels: blocks of the lowest level are evicted first.
//
// It evicts as LRU does until something has been learned, and while LRU would have had more hits. A
// run takes 64 bytes and a block 12. At most two entries per block of the capacity are kept for
// evicted blocks.
//
// This class is the common part: `ReplayedRuns` drives it by whole requests, `LiveRuns` by the
// events of a tier.
class RunPolicy {
 public:
  using Class = ReuseModel::Class;

  // Places lo .. hi - 1 of the requested path, which become a run.
  struct Part {
    std::uint32_t lo, hi;
    std::uint32_t num_uses;
    std::uint32_t gap;  // feature: how long ago it was used before
    bool is_last;
    Class cls;
    Retention words{};  // its hints
  };

  // See make_replayed. keeper: of the blocks; it outlives the policy.
  RunPolicy(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks,
            const Keeper& keeper);
  RunPolicy(const RunPolicy&) = delete;
  RunPolicy& operator=(const RunPolicy&) = delete;

  // Set the capacity of the tier, in blocks.
  void set_capacity(std::size_t capacity);
  // Reserve memory for about this many blocks.
  void expect(std::size_t num_blocks);
  // Set the depth, in blocks, at which a block is worth twice the first one of its prompt; 0: all
  // are worth the same.
  void set_doubling(double doubles_at_blocks) {
    per_block_ = doubles_at_blocks > 0.0 ? 1.0 / doubles_at_blocks : 0.0;
    guard_.set_uneven(is_uneven());
  }

  std::size_t num_blocks() const { return blocks_.size(); }
  std::size_t num_history() const { return ghosts_.num_entries(); }
  std::size_t num_bytes() const;
  // Throws BrokenPromise if an invariant is broken. O(all blocks).
  void check() const;

  // Begin a request for a path, of which `found` are the resident first blocks. It takes them out
  // of their runs, into `parts`, which `keep_runs` makes runs.
  void begin(std::span<const Key> path, std::span<const Index> found, double now);
  // Do the same for a state: the blocks from `first` on, which a request needs beside its prompt.
  // cls: class of the prompt's run that the state continues. at_end: see `Live::used_state`.
  void begin_state(std::span<const Key> path, std::span<const Index> found, std::uint32_t first,
                   Class cls, bool at_end, double now);
  const std::vector<Part>& parts() const { return parts_; }
  double gain(const Part& part) { return model_.value_of_new(part.cls) * worth(part.lo, part.hi); }
  // Make the parts runs. resident: the first blocks of the path. tries_all: LRU would have admitted
  // the others.
  void keep_runs(std::span<const Key> path, std::span<const Index> resident, bool tries_all);

  Index add(Index parent, Index item) {
    const Index block = blocks_.add(parent, item);
    note_children(parent);
    return block;
  }
  // Evict the block of the least value, unless it is worth too much for a new block's gain. Returns
  // its item; kNone if none was evicted.
  Index lose_one(double gain);

 protected:
  // The victim of a new block is worth at most this share of it.
  static constexpr double kEnter = 0.9;

  bool decides_as_lru() const { return guard_.is_lru() || !model_.has_learned(); }

  // Eviction from runs.
  Index choose();
  Index drop_tail(Index run);
  void forget(Index run);
  void forget_most();  // the oldest evicted blocks, while the history is too long

  // Whether the value of a block depends on its depth.
  bool is_uneven() const { return per_block_ > 0.0; }
  double age(const Run& run) const { return now_ - run.last_use; }
  // Mean value of a block among those from lo to hi - 1. A deeper block is worth more, but it is of
  // no use without the blocks before it, so all blocks of a run have the same value.
  double worth(std::uint32_t lo, std::uint32_t hi) const;
  double value(const Run& run) { return model_.value(run.cls, age(run)) * worth(run.lo, run.mid); }
  bool may_shrink(Index run) const { return ends_a_path(run) && is_let_go(run); }
  bool is_inside(Index block) const { return block != kNone && !blocks_.is_leaf(block); }
  // Note that the number of a block's children has changed.
  void note_children(Index block) {
    const Index run = block == kNone ? kNone : blocks_[block].run;
    if (run != kNone && runs_[run].tail == block) runs_.set_inside(run, is_inside(block));
  }
  // Returns its parent.
  Index remove(Index block) {
    const Index parent = blocks_.remove(block);
    note_children(parent);
    return parent;
  }

  std::size_t capacity_;
  double per_block_ = 0.0;           // additional value of a block for each one before it
  std::array<double, 256> weights_;  // of the shorter runs
  const Keeper& keeper_;
  Random random_;
  ReuseModel model_;
  Guard guard_;
  Blocks blocks_;
  Runs runs_;
  Ghosts ghosts_;
  double now_ = 0.0;
  std::size_t num_requests_ = 0;
  std::size_t next_lesson_;
  Index victim_ = kNone;       // the run that is losing blocks
  double victim_value_ = 0.0;  // of its blocks, if they were the first of their prompts
  // During `admit`: runs that count as evicted already, and the blocks in front of them.
  std::vector<Index> passed_over_;
  std::vector<Index> exposed_;
  std::vector<Part> parts_;      // of the current request
  std::uint32_t num_known_ = 0;  // number of the path's first blocks that were used before

 private:
  // Comparison of the path with the known runs.
  std::size_t lru_hits(std::span<const Key> path, std::span<const Index> found) const;
  void compare(std::span<const Key> path, std::span<const Index> found);
  std::uint32_t reach(std::span<const Key> path, Index run, std::uint32_t from) const;
  Index ghost_at(std::span<const Key> path, std::uint32_t at) const;
  Ghosts::Found next_ghost(std::span<const Key> path, std::uint32_t from) const;
  void take(Index run, std::uint32_t from, std::uint32_t to);
  void cut(std::span<const Key> path, std::span<const Index> found, std::uint32_t first);
  void add_new_part(std::uint32_t num_asked);
  void set_last_apart();
  void name_parts(std::uint32_t num_asked);
  std::uint32_t num_gone_behind(Index tail) const;
  bool ends_a_path(Index run) const;
  bool is_let_go(Index run) const;
  bool is_passed_over(Index run) const;
  bool may_end_a_path(const Resident& resident) const;
  Index choose_among(const List<Resident>& residents);
  void look_at(Index run);
  Index best_leaf();
  void learn();
  double weight(std::uint32_t num_blocks) const;

  // A candidate for eviction; the keeper may still forbid it.
  struct Leaf {
    Index run;
    std::uint64_t number;
    double value;
  };

  // Kept from call to call, to spare allocations.
  std::vector<Leaf> leaves_;  // candidates examined
  std::vector<ReuseModel::Waiting> waiting_;
};

}  // namespace kvtier::policy
