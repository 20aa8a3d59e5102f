// Runs: the blocks that a request has used and that no later request has used since.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "policy/numbers.hpp"
#include "policy/pool.hpp"
#include "policy/retention.hpp"
#include "policy/reuse.hpp"

namespace kvtier::policy {

// Blocks lo .. hi - 1 of one request's path, all of one class. They are evicted from the end:
//
//   start <= lo       mid        hi     places in the path
//            |resident | ghost    |
//
// start is where the run began. A later request with the same path takes the blocks that it uses,
// so lo increases. Forgetting the evicted blocks sets hi to mid.
struct Run {
  std::uint64_t number;  // in the order of use, from 1 on; 0: of no run
  double last_use;       // seconds
  std::uint32_t start, lo, mid, hi;
  std::uint32_t
      stride;          // keys are kept of every stride-th evicted block, and of the last one
  Index tail;          // the last resident block, if there is one
  Index older, newer;  // by use
  Index place;         // in `residents`; kNone without resident blocks
  Index ghost;         // kNone if no key is kept
  std::uint32_t tried;  // LRU would have admitted the blocks before this place
  ReuseModel::Class cls : 15;
  ReuseModel::Class is_inside : 1;  // the tail has resident children
  std::uint16_t num_uses;

  bool is_resident() const { return mid > lo; }
  std::uint32_t size() const { return hi - lo; }
  bool keeps_key(std::uint32_t at) const { return at == hi - 1 || (at - start) % stride == 0; }
};
static_assert(sizeof(Run) == 64);

// List entry of a run that has resident blocks. Half of all runs have resident blocks behind their
// last one; is_inside lets a search for victims skip them without reading the run.
struct Resident {
  Index run : 31;
  Index is_inside : 1;
};
static_assert(sizeof(Resident) == sizeof(Index));

// All runs, in the order of their use. The latest runs are what an LRU tier of `capacity` blocks
// would hold.
class Runs {
 public:
  // seed: of the random order in which runs with resident blocks are listed.
  Runs(std::size_t capacity, std::uint64_t seed) : capacity_(capacity), random_(seed) {}

  Run& operator[](Index run) { return pool_[run]; }
  const Run& operator[](Index run) const { return pool_[run]; }
  // Reserve memory for about this many runs; see `Rows`.
  void reserve(std::size_t num) {
    pool_.reserve(num);
    residents_[kUsual].reserve(num);
  }
  void prefetch(Index run) const { pool_.prefetch(run); }
  std::size_t size() const { return pool_.size(); }
  Index end() const { return pool_.end(); }
  bool is_live(Index run) const { return pool_[run].number != 0; }
  std::size_t num_bytes() const {
    std::size_t num_listed = 0;
    for (const auto& each : residents_) num_listed += each.num_bytes();
    return pool_.num_bytes() + num_listed + said_.capacity() * sizeof(Heard) +
           ends_.capacity() * sizeof(End);
  }

  // Add a run as the last one used. Its number and its links are filled in here.
  Index add(Run run);
  void remove(Index run);
  // Remove the blocks before `to`, which belong to another run now; or forget the evicted ones.
  void take_front(Index run, std::uint32_t to);
  void forget_ghost(Index run);
  // Note that the last resident block was evicted. is_inside: whether the new tail has children.
  void shorten(Index run, Index new_tail, bool is_inside);
  // Note that the next block is resident: one that was evicted or expected, or a new one at the
  // end. No block is behind it.
  void grow(Index run, Index new_tail);
  // Set whether the last resident block has children.
  void set_inside(Index run, bool is_inside);
  // Remove the blocks from `end` on, which belong to another run now, and the evicted ones.
  void cut_off(Index run, std::uint32_t end, Index new_tail, bool is_inside);

  // Return the run that was used last; kNone if there is none.
  Index newest() const { return ages_.newest; }
  // Return the number of runs made so far, which is the number of the newest.
  std::uint64_t num_made() const { return num_made_; }

  // Return the runs of a level with resident blocks, in random order: neighbours are a random
  // sample.
  const List<Resident>& residents(std::size_t level) const { return residents_[level]; }

  // Return the hints on a run. They are kept apart from the runs, so that they cost nothing if
  // there are none.
  Retention retention(Index run) const { return is_said(run) ? said_[run].words : Retention{}; }
  Level level(Index run) const { return is_said(run) ? said_[run].level : kUsual; }
  void retain(Index run, const Retention& words, double now);
  // Return how many more blocks a tenant's hints may raise. All blocks of a raised run count,
  // including expected and evicted ones.
  std::size_t room_to_raise(std::uint64_t tenant) const;
  // Remove expired hints.
  void expire(double now);
  // Whether any run has another level than the usual one.
  bool has_retained() const { return num_retained_ > 0; }

  // Set the capacity of the tier, in blocks.
  void set_capacity(std::size_t capacity) {
    capacity_ = capacity;
    narrow();
  }

  // Whether LRU would have kept the run's block at this place.
  bool would_be_kept(Index run, std::uint32_t at) const;

  // Throws BrokenPromise.
  void check() const;

 private:
  void narrow();
  void list(Index run);
  void unlist(Index run);
  bool is_in_window(const Run& run) const {
    return first_ != kNone && run.number >= pool_[first_].number;
  }

  // Hints on a run. end: time of their next end, as queued in `ends_`. level: of the list it is in.
  struct Heard {
    Retention words;
    double end = Retention::kNever;
    Level level = kUsual;
  };
  // Time at which a hint on a run ends; stale if the run has another end, or is another run.
  struct End {
    double time;
    std::uint64_t number;
    Index run;

    bool operator<(const End& other) const {  // the first at the top
      return time > other.time || (time == other.time && number > other.number);
    }
  };

  bool is_said(Index run) const { return run < said_.size(); }
  bool is_stale(const End& end) const {
    return !is_said(end.run) || pool_[end.run].number != end.number || said_[end.run].end != end.time;
  }
  void move_to(Index run, Level level);
  // Count blocks that become part of a raised run, or cease to be.
  void count_raised(const Retention& words, std::int64_t num);
  void resized(Index run, std::int64_t num) {
    if (is_said(run)) count_raised(said_[run].words, num);
  }
  void await_end(Index run);

  std::size_t capacity_;
  Random random_;
  Pool<Run> pool_;
  std::array<List<Resident>, kNumLevels> residents_;
  std::vector<Heard> said_;  // by run; shorter if the last ones have no hints
  std::vector<End> ends_;   // a heap
  std::size_t num_said_ = 0;
  std::size_t num_retained_ = 0;
  std::size_t num_raised_ = 0;                              // blocks
  std::unordered_map<std::uint64_t, std::size_t> raised_;  // raised blocks by tenant
  Ages ages_;  // by use
  std::uint64_t num_made_ = 0;
  // The window: the runs from `first_` to the newest. Without its first run it has less than
  // `capacity_` blocks.
  Index first_ = kNone;
  std::size_t num_in_window_ = 0;  // blocks
};

}  // namespace kvtier::policy
