// A policy that works on runs of blocks, and learns when they are used again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/ghosts.hpp"
#include "policy/guard.hpp"
#include "policy/replayed.hpp"
#include "policy/reuse.hpp"
#include "policy/runs.hpp"
#include "policy/tree.hpp"

namespace kvtier::policy {

// A request cuts the runs that it uses again, and its path becomes runs of its own: what it had
// from each of them, what is new, and the last block by itself, for an answer follows it. Of each
// class of runs it is learned when they are used again. The run that is worth least loses blocks
// from its end, and a new block is stored only where it is worth more than what leaves for it. A
// request's own blocks never leave for its later ones.
//
// As LRU until something has been learned, and where LRU would have had more hits. A run has 64
// bytes, a block 24, and of what has left at most two entries per block of the capacity are kept.
class RunPolicy final : public Replayed {
 public:
  // See make_replayed.
  RunPolicy(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks);

  std::size_t request(std::span<const Key> path, double now) override;

  std::size_t num_blocks() const override { return blocks_.size(); }
  std::size_t num_history() const override { return ghosts_.num_entries(); }
  std::size_t num_bytes() const override;
  void check() const override;

 private:
  using Class = ReuseModel::Class;

  struct Mark {
    Index run;
  };
  // Places lo .. hi - 1 of the path that is asked for; about to be a run.
  struct Part {
    std::uint32_t lo, hi;
    std::uint32_t num_uses;
    std::uint32_t gap;  // feature: how long ago it was used before
    bool is_last;
    Class cls;
  };

  bool decides_as_lru() const { return guard_.is_lru() || !model_.has_learned(); }

  // What is asked for, compared with what is known.
  std::size_t lru_hits(std::span<const Key> path, std::size_t num_hits) const;
  void compare(std::span<const Key> path, std::size_t num_hits);
  std::uint32_t reach(std::span<const Key> path, Index run, std::uint32_t from) const;
  Ghosts::Found next_ghost(std::span<const Key> path, std::uint32_t from) const;
  void take(Index run, std::uint32_t from, std::uint32_t to);
  void cut(std::span<const Key> path, std::size_t num_hits);
  void name_parts(std::size_t num_asked);

  // What stays.
  std::uint32_t store(std::span<const Key> path, std::uint32_t num_hits);
  bool make_room(double gain);
  void look(std::size_t num_wanted);
  Index choose();
  void drop_tail(Index run);
  void keep_runs(std::span<const Key> path, std::uint32_t num_stored);
  void forget(Index run);
  void learn();

  double age(const Run& run) const { return now_ - run.last_use; }
  double weight(std::uint32_t num_blocks) const;
  double worth(std::uint32_t at) const;
  double value(const Run& run) { return model_.value(run.cls, age(run)) * worth(run.mid - 1); }
  bool is_leaf(const Run& run) const { return blocks_.is_leaf(run.tail); }

  std::size_t capacity_;
  double per_block_;                 // by how much more a block is worth for each one before it
  std::array<double, 256> weights_;  // of the shorter runs
  Random random_;
  ReuseModel model_;
  Guard guard_;
  Tree<Mark> blocks_;
  Runs runs_;
  Ghosts ghosts_;
  double now_ = 0.0;
  std::size_t num_requests_ = 0;
  std::size_t next_lesson_;
  Index victim_ = kNone;       // the run that is losing blocks
  double victim_value_ = 0.0;  // of its blocks, were they the first of their prompts
  // Of the request that is being made; kept from call to call, to spare allocations.
  std::vector<Index> found_;  // the blocks of the path that are resident
  std::vector<Part> parts_;
  std::vector<Index> leaves_;    // that were looked at
  std::uint32_t num_known_ = 0;  // how many of its first blocks were used before
  std::vector<ReuseModel::Waiting> waiting_;
};

}  // namespace kvtier::policy
