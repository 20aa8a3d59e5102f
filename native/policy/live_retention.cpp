// Retention hints on a prompt, and the runs that they apply to.
#include <algorithm>

#include "policy/live_runs.hpp"

namespace kvtier::policy {

// Returns the run that a place of the path belongs to, or is expected in; kNone if it is unknown.
Index LiveRuns::run_at(std::span<const Key> path, std::span<const Index> found,
                       std::uint32_t at) const {
  if (at < found.size()) return blocks_[found[at]].run;
  const Expected::Entry* const entry = entry_of(path[at]);
  return entry != nullptr && entry->at == at ? entry->run : kNone;
}

// Returns the end of the blocks that other prompts share, as far as the resident blocks show it.
std::uint32_t LiveRuns::end_of_shared(std::span<const Index> found) const {
  auto end = static_cast<std::uint32_t>(found.size());
  for (std::uint32_t num_own = 0; end > 0; --end, num_own = 1) {
    const Block& it = blocks_[found[end - 1]];
    if (it.is_fork || it.num_children > num_own) break;
  }
  return end;
}

void LiveRuns::retain(std::span<const Key> path, std::span<const Index> items, const BlockHint& said,
                      double now) {
  const std::span<const Index> found = blocks_.numbers(items, found_);
  now_ = std::max(now_, now);
  runs_.expire(now_);
  victim_ = kNone;
  planned_.clear();
  std::uint32_t first = said.first;
  if (said.word == HintKind::ended) first = std::max(first, end_of_shared(found));
  const auto end = static_cast<std::uint32_t>(std::min<std::size_t>(said.end, path.size()));
  Index before = kNone;
  for (std::uint32_t at = 0, stop = 0; at < end; at = stop) {
    Index run = run_at(path, found, at);
    bool is_known = run != kNone && runs_[run].lo == at;
    for (stop = at; stop < end && run_at(path, found, stop) == run; ++stop) {
      if (stop >= found.size()) continue;
      is_known &= blocks_[found[stop]].parent == before;
      before = found[stop];
    }
    // A block whose place was unknown lies elsewhere until a request has it.
    if (!is_known || stop <= first) continue;
    const Retention words = runs_.retention(run);
    if (words.with(said, now_) == words) continue;
    const std::uint32_t from = std::max(at, first);
    // A run that is raised already may stay raised for longer. Of others only as many blocks are
    // raised as the tenant's limit allows.
    if (said.raises() && !(words.is_raised() && words.tenant == said.tenant)) {
      const std::size_t room = runs_.room_to_raise(said.tenant);
      if (room == 0) continue;
      stop = static_cast<std::uint32_t>(std::min<std::size_t>(stop, from + room));
    }
    if (from > at) split(path, found, run, from);
    if (!runs_.is_live(run) || runs_[run].lo != from) continue;  // no block of it is left
    if (stop < runs_[run].hi && stop != runs_[run].mid) run = split(path, found, run, stop);
    runs_.retain(run, words.with(said, now_), now_);
  }
  forget_most();
}

// Cuts the run at `at`, where it begins from now on. Returns the run of the blocks before.
Index LiveRuns::split(std::span<const Key> path, std::span<const Index> found, Index run,
                      std::uint32_t at) {
  Run front = runs_[run];
  const Retention words = runs_.retention(run);
  front.hi = at;
  front.mid = std::min(front.mid, at);
  front.tried = std::clamp(front.tried, front.mid, at);
  front.tail = front.is_resident() ? found[front.mid - 1] : kNone;
  front.is_inside = is_inside(front.tail);
  front.ghost = kNone;
  Run& rest = runs_[run];
  runs_.take_front(run, at);
  ghosts_.drop(rest.ghost, at);
  if (rest.ghost == kNone) runs_.forget_ghost(run);
  if (rest.size() == 0) runs_.remove(run);
  const Index made = runs_.add(front);
  runs_.retain(made, words, now_);
  for (std::uint32_t each = front.lo; each < front.mid; ++each) blocks_[found[each]].run = made;
  for (std::uint32_t each = front.mid; each < front.hi; ++each) {
    if (front.keeps_key(each)) ghosts_.add(made, runs_[made].ghost, path[each], each);
    expected_.add(path[each], each > 0 ? path[each - 1] : 0, made, runs_[made].number, each);
  }
  return made;
}

}  // namespace kvtier::policy
