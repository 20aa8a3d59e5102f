#include "policy/live_runs.hpp"

#include <algorithm>

namespace kvtier::policy {

namespace {

constexpr std::size_t kFewestExpected = std::size_t{1} << 16;
constexpr std::size_t kExpectedShare = 16;  // capacity per expected block
constexpr std::size_t kMaxPassed = 64;      // victims remembered by `admit`

}  // namespace

LiveRuns::LiveRuns(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks,
                   const Keeper& keeper)
    : RunPolicy(capacity, seed, doubles_at_blocks, keeper),
      expected_(std::max(kFewestExpected, capacity / kExpectedShare)) {}

// -- requests
// ---------------------------------------------------------------------------------------------

void LiveRuns::asked(std::span<const Key> path, std::span<const Index> items, double now) {
  if (path.empty()) return;
  const std::span<const Index> found = blocks_.numbers(items, found_);
  settle(found);
  const Index last = found.empty() ? kNone : found.back();
  const Index its_run = last == kNone ? kNone : blocks_[last].run;
  const bool has_left = its_run != kNone && runs_[its_run].hi > runs_[its_run].mid;
  begin(path, found, now);
  // The prompts fork here: another one continues behind this block, or this one ended here before.
  if (last != kNone && (blocks_[last].num_children > 0 || found.size() == path.size() ||
                        (has_left && num_known_ == found.size())))
    blocks_[last].is_fork = 1;
  expect_runs(path, found);
}

void LiveRuns::used_state(std::span<const Key> path, std::span<const Index> items,
                          std::uint32_t first, Key front, bool at_end, double now) {
  if (path.size() <= first) return;
  const std::span<const Index> found = blocks_.numbers(items, found_);
  settle(found);
  const Expected::Entry* const entry = entry_of(front);
  const Index block = find(front);
  const Index run = block != kNone ? blocks_[block].run : entry != nullptr ? entry->run : kNone;
  begin_state(path, found, first, run == kNone ? unknown_class() : runs_[run].cls, at_end, now);
  expect_runs(path, found);
}

// Makes the parts of a request runs, and expects their blocks that are not resident.
void LiveRuns::expect_runs(std::span<const Key> path, std::span<const Index> found) {
  const std::uint64_t num_before = runs_.num_made();
  keep_runs(path, found, false);
  for (Index run = runs_.newest(); run != kNone && runs_[run].number > num_before;
       run = runs_[run].older) {
    const Run& it = runs_[run];
    for (std::uint32_t at = it.mid; at < it.hi; ++at)
      expected_.add(path[at], at > 0 ? path[at - 1] : 0, run, it.number, at);
  }
}

// Moves blocks to their places in the path. They may lie elsewhere if their place was not known, or
// if the block in front of them was missing.
void LiveRuns::settle(std::span<const Index> found) {
  Index before = kNone;
  Index run = kNone;
  for (std::uint32_t at = 0; at < found.size(); before = found[at++]) {
    const Block& it = blocks_[found[at]];
    const bool begins_run = it.run != run || run == kNone;
    run = it.run;
    const bool is_elsewhere = begins_run && run != kNone && runs_[run].lo != at;
    if (it.parent == before && !is_elsewhere) continue;
    leave_run(found[at]);
    const Index parent = it.parent;
    blocks_.hang_below(found[at], before);
    note_children(parent);
    note_children(before);
    run = kNone;
  }
}

// -- admission
// ---------------------------------------------------------------------------------------------

void LiveRuns::continues(std::span<const Key> names, Key before) {
  std::uint32_t at = 0;
  if (const Index block = find(before); block != kNone)
    at = place_of(block) + 1;
  else if (const Expected::Entry* const entry = expected_.find(before))
    at = entry->at + 1;
  expected_.add_behind(before, names, at, [this](Key name) { return find(name) != kNone; });
}

bool LiveRuns::is_of_a_run(const Expected::Entry& entry) const {
  if (entry.run == kNone || !runs_.is_live(entry.run)) return false;
  const Run& run = runs_[entry.run];
  return static_cast<std::uint32_t>(run.number) == entry.number && entry.at < run.hi;
}

// Returns the expected block; null if no run expects it.
const Expected::Entry* LiveRuns::entry_of(Key name) const {
  const Expected::Entry* const entry = expected_.find(name);
  return entry != nullptr && is_of_a_run(*entry) ? entry : nullptr;
}

// Returns the run of the block in front of the first name; kNone if it is not resident.
Index LiveRuns::run_in_front_of(std::span<const Key> names) const {
  const Expected::Entry* const entry = names.empty() ? nullptr : expected_.find(names.front());
  const Index block = entry != nullptr && entry->at > 0 ? find(entry->before) : kNone;
  return block == kNone ? kNone : blocks_[block].run;
}

// Returns the next victim, and counts it as evicted for the following choices.
Index LiveRuns::pass_over_next() {
  const Index run = choose();
  if (run == kNone) return kNone;
  if (passed_over_.size() == kMaxPassed) {  // the first one stays: it may be `front`
    passed_over_.erase(passed_over_.begin() + 1);
    exposed_.erase(exposed_.begin() + 1);
  }
  passed_over_.push_back(run);
  Index in_front = runs_[run].tail;
  for (std::uint32_t num = runs_[run].mid - runs_[run].lo; num > 0; --num) {
    keeper_.prefetch(blocks_.item(in_front));  // it is about to leave
    in_front = blocks_[in_front].parent;
  }
  exposed_.push_back(in_front);
  planned_.push_back({run, runs_[run].number});
  return run;
}

void LiveRuns::admit(std::span<const Key> names, std::size_t num_free, double least_chance,
                     std::vector<std::uint32_t>& which) {
  const bool is_lru = decides_as_lru();
  const bool is_dear = least_chance > 0.0 && !is_lru;
  const bool takes_all = is_lru ? names.size() <= num_free || !runs_.has_retained()
                                : names.size() <= num_free && !is_dear;
  planned_.clear();
  ReuseModel::Class cls = 0;
  double gain = takes_all ? 0.0 : model_.value_of_new(cls);
  double its_worth = 1.0;
  double chance = 1.0;
  bool is_known = false;  // `chance` is that of this class and this victim
  Level level = kUsual;
  Index run = kNone;
  Index victim = kNone;
  std::uint32_t at = 0;  // end of the victim's remaining blocks
  double its_value = 0.0;
  bool may_leave = true;
  bool was_left_out = false;
  bool lacks_worth = false;  // not admitted for its value, not only for `least_chance`
  // The run in front of these blocks is not their victim: deeper blocks are worth more, but are of
  // no use without it.
  const Index front = takes_all || !is_uneven() ? kNone : run_in_front_of(names);
  if (front != kNone) {
    passed_over_.push_back(front);
    exposed_.push_back(kNone);
  }
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    const Expected::Entry* const entry = takes_all ? nullptr : entry_of(names[i]);
    if (entry != nullptr && entry->run != run) {
      run = entry->run;
      const Run& it = runs_[run];
      cls = it.cls;
      its_worth = worth(it.lo, it.hi);
      gain = model_.value(cls, age(it)) * its_worth;
      level = runs_.level(run);
      is_known = false;
    }
    const bool is_behind = i > 0 && (entry == nullptr || entry->before == names[i - 1]);
    if (!takes_all && !(was_left_out && is_behind)) {
      if (num_free == 0 && may_leave && (victim == kNone || at == runs_[victim].lo)) {
        victim = pass_over_next();
        may_leave = victim != kNone;
        is_known = false;
        if (may_leave) {
          at = runs_[victim].mid;
          its_value = model_.value(runs_[victim].cls, age(runs_[victim]));
        }
      }
      const bool has_none = num_free == 0 && !may_leave && front != kNone;
      const double price = victim == kNone ? 0.0 : its_value * worth(runs_[victim].lo, at);
      const Level its_level = victim == kNone ? level : runs_.level(victim);
      if (has_none) {
        lacks_worth = false;
        was_left_out = true;
      } else if (its_level != level) {
        lacks_worth = its_level > level;
        was_left_out = lacks_worth;
      } else {
        if (is_dear && !is_known) {
          chance = model_.chance(cls, price / its_worth);
          is_known = true;
        }
        lacks_worth = !is_lru && price > kEnter * gain;
        was_left_out = lacks_worth || (is_dear && level <= kUsual && chance < least_chance);
      }
      if (!was_left_out && num_free > 0)
        --num_free;
      else if (!was_left_out && may_leave)
        --at;
    }
    if (!was_left_out) which.push_back(i);
    // LRU would have admitted it, if writes were free.
    if (was_left_out && lacks_worth && entry != nullptr)
      runs_[entry->run].tried = std::max(runs_[entry->run].tried, entry->at + 1);
  }
  passed_over_.clear();
  exposed_.clear();
  std::reverse(planned_.begin(), planned_.end());
}

// Returns the place of a block. It steps back from the end of the run, near which the block mostly
// is.
std::uint32_t LiveRuns::place_of(Index block) const {
  const Run& run = runs_[blocks_[block].run];
  std::uint32_t at = run.mid - 1;
  for (Index behind = run.tail; behind != block; behind = blocks_[behind].parent) --at;
  return at;
}

void LiveRuns::entered(Key name, Index item, std::optional<Place> place, Index behind) {
  const std::optional<Expected::Entry> entry = expected_.take(name);
  Index run = kNone;
  Index parent = place ? blocks_.number(place->parent) : kNone;
  std::uint32_t at = place ? place->at : 0;
  if (entry && is_of_a_run(*entry)) {
    const Run& it = runs_[entry->run];
    at = entry->at;
    if (!place && at > 0) {
      const bool is_next = at == it.mid && at > it.lo;
      parent = is_next ? it.tail : find(entry->before);
    }
    // A block behind a missing one cannot join its run.
    if (at == it.mid && (at == it.lo || it.tail == parent)) run = entry->run;
  } else if (!place && entry && entry->run == kNone) {
    at = entry->at;
    if (at > 0) parent = find(entry->before);
  } else if (!place && behind != kNone) {
    parent = blocks_.number(behind);
    at = place_of(parent) + 1;
  }
  if (run == kNone && parent != kNone) {
    const Index its = blocks_[parent].run;
    const Run& above = runs_[its];
    if (above.tail == parent && above.mid == above.hi && above.mid == at) run = its;
  }
  const Index block = blocks_.add(parent, item);
  if (run == kNone)
    begin_run(block, at);
  else
    grow(run, block);
  note_children(parent);
}

void LiveRuns::grow(Index run, Index block) {
  Run& it = runs_[run];
  const std::uint32_t at = it.mid;
  const bool is_kept = at < it.hi && it.keeps_key(at);
  runs_.grow(run, block);
  blocks_[block].run = run;
  if (!is_kept) return;
  ghosts_.drop(it.ghost, at + 1);
  if (it.ghost == kNone) runs_.forget_ghost(run);
}

// Makes a run of one block that was in no request.
void LiveRuns::begin_run(Index block, std::uint32_t at) {
  Run made{};
  made.last_use = now_;
  made.start = made.lo = at;
  made.mid = made.hi = made.tried = at + 1;
  made.stride = 1;
  made.tail = block;
  made.ghost = kNone;
  made.cls = unknown_class();
  made.num_uses = 1;
  blocks_[block].run = runs_.add(made);
}

// -- eviction
// ---------------------------------------------------------------------------------------------

// Chooses the victims with which `admit` has compared the admitted blocks.
void LiveRuns::follow_plan() {
  if (victim_ != kNone && may_shrink(victim_)) return;
  for (victim_ = kNone; victim_ == kNone && !planned_.empty(); planned_.pop_back()) {
    const auto [run, number] = planned_.back();
    if (runs_[run].number == number && may_shrink(run)) victim_ = run;
  }
}

Index LiveRuns::next_victim() {
  follow_plan();
  if (victim_ == kNone) victim_ = choose();
  const Index item = victim_ == kNone ? kNone : drop_tail(victim_);
  forget_most();
  return item;
}

void LiveRuns::evict(std::size_t num_blocks, std::vector<Index>& items) {
  begin_evicting();
  for (; num_blocks > 0; --num_blocks) {
    const Index item = next_victim();
    if (item == kNone) return;
    items.push_back(item);
  }
}

void LiveRuns::left(Index item) {
  const Index block = blocks_.number(item);
  leave_run(block);
  remove(block);
}

// Takes a block out of its run. The blocks behind it become a run of their own.
void LiveRuns::leave_run(Index block) {
  const Index run = blocks_[block].run;
  if (run == kNone) return;
  Run& it = runs_[run];
  const Index parent = blocks_[block].parent;
  const bool is_first = parent == kNone || blocks_[parent].run != run;
  if (!is_first) {
    std::uint32_t at = place_of(block);
    Run rest = it;
    ghosts_.drop(it.ghost, it.hi);
    runs_.cut_off(run, at, parent, is_inside(parent));
    if (++at < rest.mid) {
      rest.lo = at;
      rest.hi = rest.mid;
      rest.ghost = kNone;
      const Index made = runs_.add(rest);
      runs_.retain(made, runs_.retention(run), now_);
      for (Index behind = rest.tail; behind != block; behind = blocks_[behind].parent)
        blocks_[behind].run = made;
    }
  } else {
    runs_.take_front(run, it.lo + 1);
    ghosts_.drop(it.ghost, it.lo);
    if (it.ghost == kNone) runs_.forget_ghost(run);
    if (it.size() == 0) runs_.remove(run);
  }
  blocks_[block].run = kNone;
}

}  // namespace kvtier::policy
