// A policy that works on runs of blocks, and learns when they are used again.
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

// A request cuts the runs that it uses again, and its path becomes runs of its own: what it had
// from each of them, what is new, and the last block by itself, for an answer follows it. Of each
// class of runs it is learned when they are used again. The run that is worth least loses blocks
// from its end, and a new block is stored only where it is worth more than what leaves for it. A
// request's own blocks never leave for its later ones.
//
// Where somebody has said something of a prompt, its runs have levels: the lowest leave first.
//
// As LRU until something has been learned, and where LRU would have had more hits. A run has 64
// bytes, a block 12, and of what has left at most two entries per block of the capacity are kept.
//
// What is the same wherever it works: `ReplayedRuns` drives it by whole requests, `LiveRuns` by what
// happens in a tier.
class RunPolicy {
 public:
  using Class = ReuseModel::Class;

  // Places lo .. hi - 1 of the path that is asked for; about to be a run.
  struct Part {
    std::uint32_t lo, hi;
    std::uint32_t num_uses;
    std::uint32_t gap;  // feature: how long ago it was used before
    bool is_last;
    Class cls;
    Retention words{};  // what was said of it
  };

  // See make_replayed. keeper: of the blocks; it outlives the policy.
  RunPolicy(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks,
            const Keeper& keeper);
  RunPolicy(const RunPolicy&) = delete;
  RunPolicy& operator=(const RunPolicy&) = delete;

  // The tier has room for so many blocks from now on.
  void set_capacity(std::size_t capacity);
  // There will be about so many blocks: memory for them is made now.
  void expect(std::size_t num_blocks);
  // The block so deep in a prompt is worth twice what the first one is from now on; 0: all are worth
  // the same.
  void set_doubling(double doubles_at_blocks) {
    per_block_ = doubles_at_blocks > 0.0 ? 1.0 / doubles_at_blocks : 0.0;
    guard_.set_uneven(is_uneven());
  }

  std::size_t num_blocks() const { return blocks_.size(); }
  std::size_t num_history() const { return ghosts_.num_entries(); }
  std::size_t num_bytes() const;
  // Throws std::logic_error where it disagrees with itself. O(all blocks).
  void check() const;

  // A request for a path, of which `found` are the first blocks that are resident. No run has them
  // then: its parts are about to be runs.
  void begin(std::span<const Key> path, std::span<const Index> found, double now);
  const std::vector<Part>& parts() const { return parts_; }
  double gain(const Part& part) { return model_.value_of_new(part.cls) * worth(part.lo, part.hi); }
  // The parts are runs; `resident` are the first blocks of the path. tries_all: LRU would have
  // taken the others in.
  void keep_runs(std::span<const Key> path, std::span<const Index> resident, bool tries_all);

  Index add(Index parent, Index item) {
    const Index block = blocks_.add(parent, item);
    note_children(parent);
    return block;
  }
  // One block leaves, unless the least is worth more than a new one's gain allows. Returns its
  // item, kNone where none leaves.
  Index lose_one(double gain);

 protected:
  // What leaves for a new block is worth at most this share of it.
  static constexpr double kEnter = 0.9;

  bool decides_as_lru() const { return guard_.is_lru() || !model_.has_learned(); }

  // Runs that lose blocks.
  Index choose();
  Index drop_tail(Index run);
  void forget(Index run);
  void forget_most();  // as many of those that left as there is no room for in the history

  // Whether blocks are worth more or less than each other.
  bool is_uneven() const { return per_block_ > 0.0; }
  double age(const Run& run) const { return now_ - run.last_use; }
  // What a block of those from lo to hi - 1 is worth. The last of a run is worth more than those in
  // front of it, and none of these is worth its room for nothing but themselves: they stand and fall
  // together.
  double worth(std::uint32_t lo, std::uint32_t hi) const;
  double value(const Run& run) { return model_.value(run.cls, age(run)) * worth(run.lo, run.mid); }
  bool may_shrink(Index run) const { return ends_a_path(run) && is_let_go(run); }
  bool is_inside(Index block) const { return block != kNone && !blocks_.is_leaf(block); }
  // A block has got a child, or lost one.
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
  double per_block_ = 0.0;           // by how much more a block is worth for each one before it
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
  double victim_value_ = 0.0;  // of its blocks, were they the first of their prompts
  // For a moment: runs that are not chosen, as if they had left, and the blocks in front of them.
  std::vector<Index> passed_over_;
  std::vector<Index> exposed_;
  std::vector<Part> parts_;         // of the request that is being made
  std::uint32_t num_known_ = 0;  // of what is asked for, how many of the first were used before

 private:
  // What is asked for, compared with what is known.
  std::size_t lru_hits(std::span<const Key> path, std::span<const Index> found) const;
  void compare(std::span<const Key> path, std::span<const Index> found);
  std::uint32_t reach(std::span<const Key> path, Index run, std::uint32_t from) const;
  Index ghost_at(std::span<const Key> path, std::uint32_t at) const;
  Ghosts::Found next_ghost(std::span<const Key> path, std::uint32_t from) const;
  void take(Index run, std::uint32_t from, std::uint32_t to);
  void cut(std::span<const Key> path, std::span<const Index> found);
  void name_parts(std::size_t num_asked);
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

  // A run that could lose a block, as far as it knows itself.
  struct Leaf {
    Index run;
    std::uint64_t number;
    double value;
  };

  // Kept from call to call, to spare allocations.
  std::vector<Leaf> leaves_;  // that were looked at
  std::vector<ReuseModel::Waiting> waiting_;
};

}  // namespace kvtier::policy
