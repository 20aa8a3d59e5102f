// Runs: what a request has used and no later one since.
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

// Blocks lo .. hi - 1 of one request's path, all of one class. They leave from the end:
//
//   start <= lo       mid        hi     places in the path
//            |resident | ghost    |
//
// start is where the run began. Another request that goes along the path takes what it uses, so
// that lo moves on; what is forgotten takes hi back to mid.
struct Run {
  std::uint64_t number;  // in the order of use, from 1 on; 0: of no run
  double last_use;       // seconds
  std::uint32_t start, lo, mid, hi;
  std::uint32_t
      stride;          // of the ghost's blocks only each so many-th, and the last, has its key kept
  Index tail;          // the last resident block, where there is one
  Index older, newer;  // by use
  Index place;         // among those with resident blocks, kNone where it has none
  Index ghost;         // kNone where no key is kept
  std::uint32_t tried;  // LRU had what lies before this place: it was here, or was not let in
  ReuseModel::Class cls : 15;
  ReuseModel::Class is_inside : 1;  // the tail has resident children
  std::uint16_t num_uses;

  bool is_resident() const { return mid > lo; }
  std::uint32_t size() const { return hi - lo; }
  bool keeps_key(std::uint32_t at) const { return at == hi - 1 || (at - start) % stride == 0; }
};
static_assert(sizeof(Run) == 64);

// A run that has resident blocks, as it is listed: half of all have others behind their last one, and
// who looks for what may leave need not look at those.
struct Resident {
  Index run : 31;
  Index is_inside : 1;
};
static_assert(sizeof(Resident) == sizeof(Index));

// All runs, in the order of their use. The order alone tells what a tier of `capacity` blocks would
// hold that evicts the least recently used: the latest runs.
class Runs {
 public:
  // seed: of the order in which those with resident blocks are listed.
  Runs(std::size_t capacity, std::uint64_t seed) : capacity_(capacity), random_(seed) {}

  Run& operator[](Index run) { return pool_[run]; }
  const Run& operator[](Index run) const { return pool_[run]; }
  // There will be about so many: as that of `Rows`.
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

  // As the one that was used last. Its number and its places are filled in here.
  Index add(Run run);
  void remove(Index run);
  // The first blocks of it are another run's now, or the last ones are forgotten.
  void take_front(Index run, std::uint32_t to);
  void forget_ghost(Index run);
  // The last resident block is one no more. is_inside: the one in front of it is.
  void shorten(Index run, Index new_tail, bool is_inside);
  // The next block is resident: one that has left or was expected, or one more at the end. Nothing is
  // behind it.
  void grow(Index run, Index new_tail);
  // Whether the last resident block has children.
  void set_inside(Index run, bool is_inside);
  // The end is another run's now; what has left is not part of it any more.
  void cut_off(Index run, std::uint32_t end, Index new_tail, bool is_inside);

  // The one that was used last, kNone where there is none.
  Index newest() const { return newest_; }
  // Runs since the beginning; the number of the newest.
  std::uint64_t num_made() const { return num_made_; }

  // Runs of a level with resident blocks, in an order that is left to chance: neighbours are as good
  // a sample of all as any.
  const List<Resident>& residents(std::size_t level) const { return residents_[level]; }

  // What was said of a run. It is kept beside the runs, so that it costs nothing where nobody says
  // anything.
  Retention retention(Index run) const { return is_said(run) ? said_[run].words : Retention{}; }
  Level level(Index run) const { return is_said(run) ? said_[run].level : kUsual; }
  void retain(Index run, const Retention& words, double now);
  // How many more blocks a tenant's words may raise. Of a raised run all blocks count, also those
  // that are expected or have left.
  std::size_t room_to_raise(std::uint64_t tenant) const;
  // What is over by now counts no more.
  void expire(double now);
  // Whether a run has another level than the usual one.
  bool has_retained() const { return num_retained_ > 0; }

  // There is room for so many blocks from now on.
  void set_capacity(std::size_t capacity) {
    capacity_ = capacity;
    narrow();
  }

  // Whether least recently used first would have kept the block of this run.
  bool would_be_kept(Index run, std::uint32_t at) const;

  // Throws std::logic_error.
  void check() const;

 private:
  void narrow();
  void list(Index run);
  void unlist(Index run);
  bool is_in_window(const Run& run) const {
    return first_ != kNone && run.number >= pool_[first_].number;
  }

  // level: that it is listed by. end: when a word of it is over next, as the queue has it.
  struct Heard {
    Retention words;
    double end = Retention::kNever;
    Level level = kUsual;
  };
  // Of the words on a run; stale where the run has another end, or is another one.
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
  // Blocks of a run that is said to be raised come or go.
  void count_raised(const Retention& words, std::int64_t num);
  void resized(Index run, std::int64_t num) {
    if (is_said(run)) count_raised(said_[run].words, num);
  }
  void await_end(Index run);

  std::size_t capacity_;
  Random random_;
  Pool<Run> pool_;
  std::array<List<Resident>, kNumLevels> residents_;
  std::vector<Heard> said_;  // by run, as far as anything was said
  std::vector<End> ends_;   // a heap
  std::size_t num_said_ = 0;
  std::size_t num_retained_ = 0;
  std::size_t num_raised_ = 0;                              // blocks
  std::unordered_map<std::uint64_t, std::size_t> raised_;  // of each tenant that has some
  Index newest_ = kNone;
  Index oldest_ = kNone;
  std::uint64_t num_made_ = 0;
  // The window: the runs from `first_` to the newest. Without its first run it has less than
  // `capacity_` blocks.
  Index first_ = kNone;
  std::size_t num_in_window_ = 0;  // blocks
};

}  // namespace kvtier::policy
