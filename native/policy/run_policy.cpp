#include "policy/run_policy.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/promise.hpp"

namespace kvtier::policy {

namespace {

constexpr std::size_t kLessonEvery = 100;  // requests; twice as often at the beginning
constexpr std::size_t kLessonShare = 256;  // or runs / 256 requests, if that is more
constexpr std::size_t kMaxWaiting = 4096;  // runs that a lesson examines, a sample of more
constexpr double kSizePower = 0.3;         // a run of n blocks counts n to the power of this
constexpr std::size_t kHistory = 2;        // entries, in capacities
constexpr std::uint32_t kKeysOfGhost = 4;  // about
// Most unknown blocks in front of a kept key. The first block of a run has a key.
constexpr std::uint32_t kGap = 64;
constexpr std::size_t kUsualRunBlocks = 10;
constexpr std::uint32_t kNever = 0;
constexpr std::uint32_t kMaxUses = 0xFFFF;

// Index of the feature `Role`: the relation of blocks to their prompt.
constexpr std::size_t kRole = 1;
enum Role : std::uint8_t { kInside, kLast, kState, kStateAtEnd };

// Returns the feature of the time since the previous use, seconds: one step per factor of 4.
std::uint32_t gap_after(double age) {
  const double octaves = std::log2(std::max(1.0, age));
  return 1 + static_cast<std::uint32_t>(std::min(6.0, octaves / 2.0));
}

}  // namespace

RunPolicy::RunPolicy(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks,
                     const Keeper& keeper)
    : capacity_(capacity),
      keeper_(keeper),
      random_(seed),
      guard_(capacity),
      runs_(capacity, seed),
      next_lesson_(kLessonEvery / 2) {
  set_doubling(doubles_at_blocks);
  for (std::size_t num = 0; num < weights_.size(); ++num) weights_[num] = std::pow(num, kSizePower);
}

void RunPolicy::set_capacity(std::size_t capacity) {
  capacity_ = capacity;
  guard_.set_capacity(capacity);
  runs_.set_capacity(capacity);
}

void RunPolicy::expect(std::size_t num_blocks) {
  blocks_.reserve(num_blocks);
  runs_.reserve(num_blocks / kUsualRunBlocks);
}

std::size_t RunPolicy::num_bytes() const {
  return sizeof(*this) + blocks_.num_bytes() + runs_.num_bytes() + ghosts_.num_bytes() +
         model_.num_bytes();
}

double RunPolicy::weight(std::uint32_t num_blocks) const {
  return num_blocks < weights_.size() ? weights_[num_blocks] : std::pow(num_blocks, kSizePower);
}

double RunPolicy::worth(std::uint32_t lo, std::uint32_t hi) const {
  return 1.0 + (static_cast<double>(lo) + static_cast<double>(hi)) / 2.0 * per_block_;
}

void RunPolicy::begin(std::span<const Key> path, std::span<const Index> found, double now) {
  now_ = now;
  runs_.expire(now);
  if (num_requests_ >= next_lesson_) {
    learn();
    next_lesson_ += num_requests_ < 4 * kLessonEvery
                        ? kLessonEvery / 2
                        : std::max(kLessonEvery, runs_.size() / kLessonShare);
  }
  ++num_requests_;
  compare(path, found);
  cut(path, found, 0);
  add_new_part(static_cast<std::uint32_t>(path.size()));
  set_last_apart();
  name_parts(static_cast<std::uint32_t>(path.size()));
  victim_ = kNone;
}

void RunPolicy::begin_state(std::span<const Key> path, std::span<const Index> found,
                            std::uint32_t first, Class cls, bool at_end, double now) {
  now_ = now;
  cut(path, found, first);
  add_new_part(static_cast<std::uint32_t>(path.size()));
  // States have classes of their own, because most are never used again. All parts of one state
  // have the same class, because they are useful only together.
  ReuseModel::Features features = model_.features(cls);
  features[kRole] = at_end ? kStateAtEnd : kState;
  for (Part& part : parts_) part.cls = model_.class_of(features);
  victim_ = kNone;
}

// -- comparison of a request with the known runs
// ---------------------------------------------------------------------------------------------

// Returns the hits of LRU, as far as the kept keys of evicted blocks show them.
std::size_t RunPolicy::lru_hits(std::span<const Key> path, std::span<const Index> found) const {
  for (std::uint32_t at = 0; at < found.size(); ++at)
    if (const Index run = blocks_[found[at]].run; run != kNone && !runs_.would_be_kept(run, at))
      return at;
  std::size_t known = found.size();
  Index run = kNone;
  for (auto at = static_cast<std::uint32_t>(found.size()); at < path.size(); ++at) {
    if (at + 8 < path.size()) ghosts_.prefetch(path[at + 8]);
    const Index ghost = ghost_at(path, at);
    if (ghost == kNone) {
      const std::size_t most = run == kNone ? kGap : 2 * runs_[run].stride;
      if (at - known > most) break;
    } else {
      if (!runs_.would_be_kept(ghost, at)) break;
      run = ghost;
      known = at + 1;
    }
  }
  return known;
}

void RunPolicy::compare(std::span<const Key> path, std::span<const Index> found) {
  const std::size_t theirs = lru_hits(path, found);
  // Values grow linearly with the place, so their sum is that of the middle times their number.
  const auto sum = [&](std::size_t num) {
    const auto n = static_cast<double>(num);
    return n + n * n / 2.0 * per_block_;
  };
  guard_.judge(path.size(), sum(theirs) - sum(found.size()),
               worth(0, static_cast<std::uint32_t>(path.size())));
}

// Returns the end of the part that the path shares with the run. The path is in the run's ghost or
// at its beginning.
std::uint32_t RunPolicy::reach(std::span<const Key> path, Index run, std::uint32_t from) const {
  const Run& it = runs_[run];
  const auto end = static_cast<std::uint32_t>(std::min<std::size_t>(path.size(), it.hi));
  std::uint32_t known = from;
  for (std::uint32_t at = from; at < end && at - known <= it.stride; ++at)
    if (it.keeps_key(at) && ghost_at(path, at) == run) known = at + 1;
  return known;
}

// Returns the run that has kept the key of this place.
Index RunPolicy::ghost_at(std::span<const Key> path, std::uint32_t at) const {
  const Ghosts::Found found = ghosts_.find(path[at]);
  return found.at == at ? found.run : kNone;  // the key may be known at another place
}

// Returns the first kept key among the next blocks of the path.
Ghosts::Found RunPolicy::next_ghost(std::span<const Key> path, std::uint32_t from) const {
  const std::size_t end = std::min<std::size_t>(path.size(), from + kGap + 1);
  for (std::uint32_t at = from; at < end; ++at)
    if (const Index run = ghost_at(path, at); run != kNone) return {run, at};
  return {kNone, 0};
}

// Notes that the request uses blocks from .. to - 1 of the run, which are its first ones.
void RunPolicy::take(Index run, std::uint32_t from, std::uint32_t to) {
  Run& it = runs_[run];
  model_.used(it.cls, age(it), weight(to - from));
  const std::uint32_t num_uses = std::min(kMaxUses, it.num_uses + 1U);
  const Retention words = runs_.retention(run).after_use(now_);
  parts_.push_back({from, to, num_uses, gap_after(age(it)), false, 0, words});
  runs_.take_front(run, to);
  ghosts_.drop(it.ghost, to);
  if (it.ghost == kNone) runs_.forget_ghost(run);
  if (it.size() == 0) runs_.remove(run);
  num_known_ = to;
}

// Cuts the path from `first` on into parts: one per run that it uses again, resident or not.
void RunPolicy::cut(std::span<const Key> path, std::span<const Index> found, std::uint32_t first) {
  parts_.clear();
  num_known_ = first;
  const auto hits = static_cast<std::uint32_t>(found.size());
  for (std::uint32_t at = first; at < hits; at = num_known_) {
    const Index run = blocks_[found[at]].run;
    std::uint32_t end = at + 1;  // it may leave the run before its end
    while (end < hits && blocks_[found[end]].run == run) ++end;
    if (run == kNone) {  // blocks that were in no request
      parts_.push_back({at, end, 1, parts_.empty() ? kNever : parts_.back().gap, false, 0});
      num_known_ = end;
      continue;
    }
    if (end == hits && end == runs_[run].mid) end = reach(path, run, end);
    take(run, at, end);
  }
  while (num_known_ < path.size()) {
    const auto [run, at] = next_ghost(path, num_known_);
    // A run counts as new if the blocks before it were forgotten, or if a block is missing in front
    // of its resident ones.
    if (run == kNone || runs_[run].lo > num_known_ || runs_[run].is_resident()) break;
    take(run, num_known_, reach(path, run, at + 1));
  }
}

// Adds the blocks behind the known ones as a part.
void RunPolicy::add_new_part(std::uint32_t num_asked) {
  if (num_known_ == num_asked) return;
  const std::uint32_t gap = parts_.empty() ? kNever : parts_.back().gap;
  parts_.push_back({num_known_, num_asked, 1, gap, false, 0});
}

// Makes the last block a part of its own: it is not full, or the answer follows it.
void RunPolicy::set_last_apart() {
  if (parts_.back().hi - parts_.back().lo > 1) {
    Part last = parts_.back();
    parts_.back().hi = last.lo = last.hi - 1;
    parts_.push_back(last);
  }
  parts_.back().is_last = true;
}

void RunPolicy::name_parts(std::uint32_t num_asked) {
  const auto log = [](std::uint32_t count) {
    return static_cast<std::uint32_t>(std::bit_width(count));
  };
  const auto narrow = [](std::uint32_t feature) { return static_cast<std::uint8_t>(feature); };
  const std::uint32_t num_new = num_asked - num_known_;
  const std::uint32_t brought = std::min(6U, num_new > 0 ? log(num_new - 1) : 0);
  const std::uint32_t length = std::min(5U, (log(num_asked + 1) - 1) / 2);
  std::size_t num_parts = 0;
  for (Part part : parts_) {
    const std::uint32_t uses = std::min(4U, log(part.num_uses - 1));
    part.cls = model_.class_of({narrow(uses), part.is_last ? kLast : kInside, narrow(brought),
                                narrow(part.gap), narrow(length)});
    if (num_parts > 0 && parts_[num_parts - 1].cls == part.cls &&
        parts_[num_parts - 1].words == part.words) {
      Part& before = parts_[num_parts - 1];
      before.hi = part.hi;
      before.num_uses = std::max(before.num_uses, part.num_uses);
    } else {
      parts_[num_parts++] = part;
    }
  }
  parts_.resize(num_parts);
}

// -- eviction and history
// ---------------------------------------------------------------------------------------------

Index RunPolicy::lose_one(double gain) {
  if (victim_ != kNone && !may_shrink(victim_)) victim_ = kNone;
  if (victim_ == kNone) {
    victim_ = choose();
    if (victim_ == kNone) return kNone;
    victim_value_ = decides_as_lru() ? 0.0 : model_.value(runs_[victim_].cls, age(runs_[victim_]));
  }
  const Run& its = runs_[victim_];
  if (victim_value_ * worth(its.lo, its.mid) > kEnter * gain) return kNone;
  return drop_tail(victim_);
}

Index RunPolicy::drop_tail(Index run) {
  Run& it = runs_[run];
  const Index block = it.tail;
  const Index item = blocks_.item(block);
  const std::uint32_t at = it.mid - 1;
  if (it.keeps_key(at)) ghosts_.add(run, it.ghost, keeper_.key(item), at);
  const Index in_front = remove(block);
  runs_.shorten(run, in_front, is_inside(in_front));
  // The next block is mostly evicted with it.
  if (it.is_resident() && it.keeps_key(at - 1))
    ghosts_.prefetch(keeper_.key(blocks_.item(it.tail)));
  return item;
}

void RunPolicy::keep_runs(std::span<const Key> path, std::span<const Index> resident,
                          bool tries_all) {
  const auto num_resident = static_cast<std::uint32_t>(resident.size());
  for (const Part& part : parts_) {
    Run made{};
    made.last_use = now_;
    made.start = made.lo = part.lo;
    made.mid = std::clamp(num_resident, part.lo, part.hi);
    made.hi = part.hi;
    made.stride = std::max(1U, (part.hi - part.lo) / kKeysOfGhost);
    made.tail = made.is_resident() ? resident[made.mid - 1] : kNone;
    made.is_inside = is_inside(made.tail);
    made.ghost = kNone;
    made.tried = tries_all ? made.hi : made.mid;
    made.cls = part.cls;
    made.num_uses = static_cast<std::uint16_t>(part.num_uses);
    const Index run = runs_.add(made);
    runs_.retain(run, part.words, now_);
    for (std::uint32_t at = made.lo; at < made.mid; ++at) blocks_[resident[at]].run = run;
    for (std::uint32_t at = made.mid; at < made.hi; ++at)
      if (made.keeps_key(at)) ghosts_.add(run, runs_[run].ghost, path[at], at);
  }
  forget_most();
}

void RunPolicy::forget_most() {
  while (ghosts_.num_entries() > kHistory * capacity_) forget(ghosts_.oldest());
}

// Forgets the evicted blocks of a run. For the model they were not used while they were known.
void RunPolicy::forget(Index run) {
  Run& it = runs_[run];
  const double share = static_cast<double>(it.hi - it.mid) / it.size();
  model_.forgotten(it.cls, age(it), weight(it.size()) * share);
  ghosts_.drop(it.ghost, it.hi);
  runs_.forget_ghost(run);
  if (it.size() == 0) runs_.remove(run);
}

// Learns from the runs that wait for their next use. Of many, a sample counts for all.
void RunPolicy::learn() {
  waiting_.clear();
  const auto look_at = [&](Index run) {
    const Run& it = runs_[run];
    waiting_.push_back({it.cls, age(it), weight(it.size())});
  };
  if (runs_.size() <= kMaxWaiting) {
    for (Index run = 0; run < runs_.end(); ++run)
      if (runs_.is_live(run)) look_at(run);
  } else {
    constexpr std::size_t kAhead = 16;  // runs between prefetch and use
    std::array<Index, kAhead> ahead;
    for (std::size_t i = 0; i < kMaxWaiting + kAhead; ++i) {
      Index& run = ahead[i % kAhead];
      if (i >= kAhead && runs_.is_live(run)) look_at(run);
      if (i < kMaxWaiting) runs_.prefetch(run = random_.below(runs_.end()));
    }
    const double each = static_cast<double>(runs_.size()) / static_cast<double>(waiting_.size());
    for (ReuseModel::Waiting& it : waiting_) it.weight *= each;
  }
  model_.learn(waiting_);
}

void RunPolicy::check() const {
  promise(num_history() <= kHistory * capacity_, "runs: more is remembered than allowed");
  runs_.check();
  std::size_t num_keys = 0, num_ghosts = 0;
  blocks_.check([&](auto&& visit) {
    for (Index run = 0; run < runs_.end(); ++run) {
      if (!runs_.is_live(run)) continue;
      const Run& it = runs_[run];
      Index block = it.tail;
      for (std::uint32_t at = it.mid; at-- > it.lo; block = blocks_[block].parent) {
        promise(block != kNone && blocks_[block].run == run, "runs: a block belongs to another");
        promise(at > 0 || blocks_[block].parent == kNone, "runs: a path does not begin");
        visit(block);
      }
    }
  });
  for (Index run = 0; run < runs_.end(); ++run) {
    if (!runs_.is_live(run)) continue;
    const Run& it = runs_[run];
    promise(!it.is_resident() || it.is_inside == is_inside(it.tail),
            "runs: the last block is taken for another kind");
    promise((it.ghost != kNone) == (it.hi > it.mid), "runs: a ghost is lost");
    num_keys += ghosts_.num_keys(it.ghost);
    num_ghosts += it.ghost != kNone;
  }
  promise(num_keys + num_ghosts == ghosts_.num_entries(), "runs: ghosts are miscounted");
}

}  // namespace kvtier::policy
