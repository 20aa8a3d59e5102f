#include "policy/run_policy.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "policy/promise.hpp"

namespace kvtier::policy {

namespace {

constexpr std::size_t kLessonEvery = 100;   // requests; twice as often at the beginning
constexpr std::size_t kMostWaiting = 4096;  // runs that a lesson looks at: more, and it takes some
constexpr double kSizePower = 0.3;          // a run of n blocks counts n to the power of this
constexpr double kEnter = 0.9;    // what leaves for a new block is worth at most this share of it
constexpr double kClearly = 0.7;  // the oldest leaves, unless another is worth less than this share
constexpr std::uint32_t kLooks = 32;       // leaves looked at for one that leaves
constexpr std::size_t kHistory = 2;        // entries, in capacities
constexpr std::uint32_t kKeysOfGhost = 4;  // about
// Blocks that may be unknown in front of a key that is kept: a run's first block has one.
constexpr std::uint32_t kGap = 64;
constexpr std::uint32_t kNever = 0;
constexpr std::uint32_t kMostUses = 0xFFFF;

// Seconds since the use before, in steps of four times.
std::uint32_t gap_after(double age) {
  const double octaves = std::log2(std::max(1.0, age));
  return 1 + static_cast<std::uint32_t>(std::min(6.0, octaves / 2.0));
}

}  // namespace

RunPolicy::RunPolicy(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks)
    : capacity_(capacity),
      per_block_(doubles_at_blocks > 0.0 ? 1.0 / doubles_at_blocks : 0.0),
      random_(seed),
      guard_(capacity),
      runs_(capacity),
      next_lesson_(kLessonEvery / 2) {
  for (std::size_t num = 0; num < weights_.size(); ++num) weights_[num] = std::pow(num, kSizePower);
}

std::size_t RunPolicy::num_bytes() const {
  return sizeof(*this) + blocks_.num_bytes() + runs_.num_bytes() + ghosts_.num_bytes() +
         model_.num_bytes();
}

double RunPolicy::weight(std::uint32_t num_blocks) const {
  return num_blocks < weights_.size() ? weights_[num_blocks] : std::pow(num_blocks, kSizePower);
}

double RunPolicy::worth(std::uint32_t at) const {
  return 1.0 + (static_cast<double>(at) + 0.5) * per_block_;
}

std::size_t RunPolicy::request(std::span<const Key> path, double now) {
  now_ = now;
  if (path.empty()) return 0;
  if (num_requests_ >= next_lesson_) {
    learn();
    next_lesson_ += num_requests_ < 4 * kLessonEvery ? kLessonEvery / 2 : kLessonEvery;
  }
  ++num_requests_;
  blocks_.follow(path, found_);
  const std::size_t num_hits = found_.size();
  compare(path, num_hits);
  cut(path, num_hits);
  name_parts(path.size());
  keep_runs(path, store(path, static_cast<std::uint32_t>(num_hits)));
  while (ghosts_.num_entries() > kHistory * capacity_) forget(ghosts_.oldest());
  return num_hits;
}

// -- what is asked for, compared with what is known
// ---------------------------------------------------------------------------------------------

// As far as the keys tell that were kept of what has left.
std::size_t RunPolicy::lru_hits(std::span<const Key> path, std::size_t num_hits) const {
  for (std::uint32_t at = 0; at < num_hits; ++at)
    if (!runs_.would_be_kept(blocks_[found_[at]].mark.run, at)) return at;
  std::size_t known = num_hits;
  Index run = kNone;
  for (auto at = static_cast<std::uint32_t>(num_hits); at < path.size(); ++at) {
    if (at + 8 < path.size()) ghosts_.prefetch(path[at + 8]);
    const Ghosts::Found found = ghosts_.find(path[at]);
    if (found.run == kNone) {
      const std::size_t most = run == kNone ? kGap : 2 * runs_[run].stride;
      if (at - known > most) break;
    } else {
      if (!runs_.would_be_kept(found.run, at)) break;
      run = found.run;
      known = at + 1;
    }
  }
  return known;
}

void RunPolicy::compare(std::span<const Key> path, std::size_t num_hits) {
  const std::size_t theirs = lru_hits(path, num_hits);
  // Worth grows with the place in equal steps: that of many is that of the middle, so many times.
  const auto sum = [&](std::size_t num) {
    const auto n = static_cast<double>(num);
    return n + n * n / 2.0 * per_block_;
  };
  guard_.judge(path.size(), sum(theirs) - sum(num_hits),
               worth(static_cast<std::uint32_t>(path.size() / 2)));
}

// Up to where the path, which is in the run's ghost or at its beginning, goes along it.
std::uint32_t RunPolicy::reach(std::span<const Key> path, Index run, std::uint32_t from) const {
  const Run& it = runs_[run];
  const auto end = static_cast<std::uint32_t>(std::min<std::size_t>(path.size(), it.hi));
  std::uint32_t known = from;
  for (std::uint32_t at = from; at < end && at - known <= it.stride; ++at)
    if (it.keeps_key(at) && ghosts_.find(path[at]).run == run) known = at + 1;
  return known;
}

// The first key that is kept where the path goes on.
Ghosts::Found RunPolicy::next_ghost(std::span<const Key> path, std::uint32_t from) const {
  const std::size_t end = std::min<std::size_t>(path.size(), from + kGap + 1);
  for (std::uint32_t at = from; at < end; ++at)
    if (const Ghosts::Found found = ghosts_.find(path[at]); found.run != kNone) return found;
  return {kNone, 0};
}

// The request uses blocks from .. to - 1 of the run, which are those at its beginning.
void RunPolicy::take(Index run, std::uint32_t from, std::uint32_t to) {
  Run& it = runs_[run];
  model_.used(it.cls, age(it), weight(to - from));
  const std::uint32_t num_uses = std::min(kMostUses, it.num_uses + 1U);
  parts_.push_back({from, to, num_uses, gap_after(age(it)), false, 0});
  runs_.take_front(run, to);
  ghosts_.drop(it.ghost, to);
  if (it.ghost == kNone) runs_.forget_ghost(run);
  if (it.size() == 0) runs_.remove(run);
  num_known_ = to;
}

// The path in parts: of each run that it uses again, resident or not; and what is new.
void RunPolicy::cut(std::span<const Key> path, std::size_t num_hits) {
  parts_.clear();
  num_known_ = 0;
  const auto hits = static_cast<std::uint32_t>(num_hits);
  for (std::uint32_t at = 0; at < hits; at = num_known_) {
    const Index run = blocks_[found_[at]].mark.run;
    std::uint32_t end = at + 1;  // it may leave the run before its end
    while (end < hits && blocks_[found_[end]].mark.run == run) ++end;
    if (end == hits && end == runs_[run].mid) end = reach(path, run, end);
    take(run, at, end);
  }
  while (num_known_ < path.size()) {
    const auto [run, at] = next_ghost(path, num_known_);
    // Where what lies before it was forgotten, it counts as new.
    if (run == kNone || runs_[run].lo > num_known_) break;
    take(run, num_known_, reach(path, run, at + 1));
  }
}

void RunPolicy::name_parts(std::size_t num_asked) {
  const auto num = static_cast<std::uint32_t>(num_asked);
  const std::uint32_t num_new = num - num_known_;
  if (num_new > 0) {
    const std::uint32_t gap = parts_.empty() ? kNever : parts_.back().gap;
    parts_.push_back({num_known_, num, 1, gap, false, 0});
  }
  // The last block by itself: it is not full, or the answer follows it.
  if (parts_.back().hi - parts_.back().lo > 1) {
    Part last = parts_.back();
    parts_.back().hi = last.lo = last.hi - 1;
    parts_.push_back(last);
  }
  parts_.back().is_last = true;

  const auto log = [](std::uint32_t count) {
    return static_cast<std::uint32_t>(std::bit_width(count));
  };
  const auto narrow = [](std::uint32_t feature) { return static_cast<std::uint8_t>(feature); };
  const std::uint32_t brought = std::min(6U, num_new > 0 ? log(num_new - 1) : 0);
  const std::uint32_t length = std::min(5U, (log(num + 1) - 1) / 2);
  std::size_t num_parts = 0;
  for (Part part : parts_) {
    const std::uint32_t uses = std::min(4U, log(part.num_uses - 1));
    part.cls = model_.class_of(
        {narrow(uses), narrow(part.is_last), narrow(brought), narrow(part.gap), narrow(length)});
    if (num_parts > 0 && parts_[num_parts - 1].cls == part.cls) {
      Part& before = parts_[num_parts - 1];
      before.hi = part.hi;
      before.num_uses = std::max(before.num_uses, part.num_uses);
    } else {
      parts_[num_parts++] = part;
    }
  }
  parts_.resize(num_parts);
}

// -- what stays
// ---------------------------------------------------------------------------------------------

// From the front, as far as it is worth its room. No run has the blocks of the path now, so none of
// them leaves. Returns how many of the first are resident then.
std::uint32_t RunPolicy::store(std::span<const Key> path, std::uint32_t num_hits) {
  std::uint32_t at = num_hits;
  victim_ = kNone;
  for (const Part& part : parts_) {
    if (part.hi <= at) continue;
    const double gain = model_.value_of_new(part.cls) * worth(part.hi - 1);
    for (; at < part.hi; ++at) {
      if (!make_room(gain)) return at;
      found_.push_back(blocks_.add(path[at], at > 0 ? found_[at - 1] : kNone, {kNone}));
      ++num_stored_;
    }
  }
  return at;
}

bool RunPolicy::make_room(double gain) {
  if (blocks_.size() < capacity_) return true;
  if (victim_ != kNone && !(runs_[victim_].is_resident() && is_leaf(runs_[victim_])))
    victim_ = kNone;
  if (victim_ == kNone) {
    victim_ = choose();
    if (victim_ == kNone) return false;
    victim_value_ = decides_as_lru() ? 0.0 : model_.value(runs_[victim_].cls, age(runs_[victim_]));
  }
  if (victim_value_ * worth(runs_[victim_].mid - 1) > kEnter * gain) return false;
  drop_tail(victim_);
  return true;
}

// Leaves among the runs with resident blocks: of a few all, of many some. What each look needs
// comes near while those before it are looked at.
void RunPolicy::look(std::size_t num_wanted) {
  const std::vector<Index>& residents = runs_.residents();
  const auto num = static_cast<std::uint32_t>(residents.size());
  leaves_.clear();
  if (num <= 4 * kLooks) {
    for (const Index run : residents)
      if (is_leaf(runs_[run])) leaves_.push_back(run);
    return;
  }
  std::array<Index, kLooks> some;
  for (int round = 0; round < 4 && leaves_.size() < num_wanted; ++round) {
    for (Index& run : some) runs_.prefetch(run = residents[random_.below(num)]);
    for (const Index run : some) blocks_.prefetch(runs_[run].tail);
    for (const Index run : some)
      if (leaves_.size() < num_wanted && is_leaf(runs_[run])) leaves_.push_back(run);
  }
  // Hardly any is a leaf; but some are, unless the path has them all.
  if (!leaves_.empty()) return;
  const auto found = std::find_if(residents.begin(), residents.end(),
                                  [&](Index run) { return is_leaf(runs_[run]); });
  if (found != residents.end()) leaves_.push_back(*found);
}

// The run that loses blocks first.
Index RunPolicy::choose() {
  const bool is_lru = decides_as_lru();
  look(is_lru ? 4 * kLooks : kLooks);
  if (leaves_.empty()) return kNone;
  const auto is_older = [&](Index one, Index another) {
    return runs_[one].number < runs_[another].number;
  };
  const Index oldest = *std::min_element(leaves_.begin(), leaves_.end(), is_older);
  if (is_lru) return oldest;
  Index cheapest = kNone;
  double least = 0.0;
  for (const Index run : leaves_) {
    const double its = value(runs_[run]);
    if (cheapest != kNone && (its > least || (its == least && is_older(cheapest, run)))) continue;
    least = its;
    cheapest = run;
  }
  return least < kClearly * value(runs_[oldest]) ? cheapest : oldest;
}

void RunPolicy::drop_tail(Index run) {
  Run& it = runs_[run];
  const Index block = it.tail;
  const std::uint32_t at = it.mid - 1;
  if (it.keeps_key(at)) ghosts_.add(run, it.ghost, blocks_[block].key, at);
  runs_.shorten(run, blocks_.remove(block));
}

void RunPolicy::keep_runs(std::span<const Key> path, std::uint32_t num_stored) {
  for (const Part& part : parts_) {
    const std::uint32_t mid = std::clamp(num_stored, part.lo, part.hi);
    const std::uint32_t stride = std::max(1U, (part.hi - part.lo) / kKeysOfGhost);
    const Index tail = mid > part.lo ? found_[mid - 1] : kNone;
    const auto num_uses = static_cast<std::uint16_t>(part.num_uses);
    Run made{};
    made.last_use = now_;
    made.start = made.lo = part.lo;
    made.mid = mid;
    made.hi = part.hi;
    made.stride = stride;
    made.tail = tail;
    made.ghost = kNone;
    made.cls = part.cls;
    made.num_uses = num_uses;
    const Index run = runs_.add(made);
    for (std::uint32_t at = part.lo; at < mid; ++at) blocks_[found_[at]].mark.run = run;
    for (std::uint32_t at = mid; at < part.hi; ++at)
      if (made.keeps_key(at)) ghosts_.add(run, runs_[run].ghost, path[at], at);
  }
}

// What has left of it was not used as long as it was known.
void RunPolicy::forget(Index run) {
  Run& it = runs_[run];
  const double share = static_cast<double>(it.hi - it.mid) / it.size();
  model_.forgotten(it.cls, age(it), weight(it.size()) * share);
  ghosts_.drop(it.ghost, it.hi);
  runs_.forget_ghost(run);
  if (it.size() == 0) runs_.remove(run);
}

// Of many runs that wait for their next use some are looked at, and count for all.
void RunPolicy::learn() {
  waiting_.clear();
  const auto look_at = [&](Index run) {
    const Run& it = runs_[run];
    waiting_.push_back({it.cls, age(it), weight(it.size())});
  };
  if (runs_.size() <= kMostWaiting) {
    for (Index run = 0; run < runs_.end(); ++run)
      if (runs_.is_live(run)) look_at(run);
  } else {
    constexpr std::size_t kAhead = 16;  // runs between what is looked at and what is brought near
    std::array<Index, kAhead> ahead;
    for (std::size_t i = 0; i < kMostWaiting + kAhead; ++i) {
      Index& run = ahead[i % kAhead];
      if (i >= kAhead && runs_.is_live(run)) look_at(run);
      if (i < kMostWaiting) runs_.prefetch(run = random_.below(runs_.end()));
    }
    const double each = static_cast<double>(runs_.size()) / static_cast<double>(waiting_.size());
    for (ReuseModel::Waiting& it : waiting_) it.weight *= each;
  }
  model_.learn(waiting_);
}

void RunPolicy::check() const {
  promise(blocks_.size() <= capacity_, "runs: more blocks than there is room for");
  promise(num_history() <= kHistory * capacity_, "runs: more is remembered than allowed");
  runs_.check();
  std::size_t num_blocks = 0, num_keys = 0, num_ghosts = 0;
  for (Index run = 0; run < runs_.end(); ++run) {
    if (!runs_.is_live(run)) continue;
    const Run& it = runs_[run];
    Index block = it.tail;
    for (std::uint32_t at = it.mid; at-- > it.lo;) {
      promise(blocks_[block].mark.run == run, "runs: a block belongs to another");
      promise((at == 0) == (blocks_[block].parent == kNone), "runs: a path does not begin");
      block = blocks_[block].parent;
      ++num_blocks;
    }
    promise((it.ghost != kNone) == (it.hi > it.mid), "runs: a ghost is lost");
    num_keys += ghosts_.num_keys(it.ghost);
    num_ghosts += it.ghost != kNone;
  }
  promise(num_blocks == blocks_.size(), "runs: a block belongs to none");
  promise(num_keys + num_ghosts == ghosts_.num_entries(), "runs: ghosts are miscounted");
}

}  // namespace kvtier::policy
