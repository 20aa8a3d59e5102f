// Retention hints: the order of eviction that clients and engines request for blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtier::policy {

// Blocks of the lowest level are evicted first; in a level, those of the least value. 0 .. 100 are
// priorities of clients.
using Level = std::uint8_t;
inline constexpr Level kLeavesFirst = 0;
inline constexpr Level kUsual = 50;
inline constexpr Level kHighest = 100;
inline constexpr Level kBackSoon = 101;
inline constexpr Level kWaitedFor = 102;
inline constexpr std::size_t kNumLevels = 103;

enum class HintKind : std::uint8_t {
  keep,   // the blocks have a level of their own; a use does not end it
  back,   // the blocks will be used soon; a use ends it
  ended,  // blocks of this prompt alone will not be used again; a use ends it
  waits,  // a request for the blocks has been queued
  turn,   // a request for the blocks is queued no longer
};
inline constexpr int kNumWords = 5;

// A hint on places first .. end - 1 of a prompt. level: of `keep`. until: time of its end in
// seconds, of all but `turn`. tenant: owner of the prompt; 0 if unknown.
struct BlockHint {
  HintKind word;
  Level level;
  std::uint32_t first, end;
  double until;
  std::uint64_t tenant = 0;

  // Whether it makes the blocks stay longer than they would.
  bool raises() const {
    return word == HintKind::back || (word == HintKind::keep && level > kUsual);
  }
};

// Shares of a tier's blocks that clients may raise above the usual level: one tenant, and all
// together. A client's hints therefore cannot evict all blocks of the others.
inline constexpr std::size_t kTenantsShare = 4;  // one in so many
inline constexpr std::size_t kRaisedShare = 2;

// The hints that apply to a run. Each of them expires.
struct Retention {
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double kept_until = -kNever;
  double passes_until = -kNever;
  double waits_until = -kNever;
  std::uint64_t tenant = 0;  // whose hint raised it
  std::uint16_t num_waiting = 0;
  Level kept = kUsual;
  Level passing = kUsual;

  bool operator==(const Retention&) const = default;

  Level level() const {
    return num_waiting > 0 ? kWaitedFor : passing != kUsual ? passing : kept;
  }
  bool is_raised() const { return passing > kUsual || kept > kUsual; }
  // Returns the time at which the next hint expires.
  double ends() const {
    double next = kNever;
    if (num_waiting > 0) next = std::min(next, waits_until);
    if (passing != kUsual) next = std::min(next, passes_until);
    if (kept != kUsual) next = std::min(next, kept_until);
    return next;
  }
  // Returns the hints without expired ones.
  Retention at(double now) const {
    Retention it = *this;
    if (it.num_waiting == 0 || it.waits_until <= now) it.num_waiting = 0, it.waits_until = -kNever;
    if (it.passing == kUsual || it.passes_until <= now) it.passing = kUsual, it.passes_until = -kNever;
    if (it.kept == kUsual || it.kept_until <= now) it.kept = kUsual, it.kept_until = -kNever;
    if (!it.is_raised()) it.tenant = 0;
    return it;
  }
  Retention after_use(double now) const {
    Retention it = *this;
    it.passing = kUsual;
    return it.at(now);
  }
  Retention with(const BlockHint& said, double now) const {
    Retention it = at(now);
    if (said.raises()) it.tenant = said.tenant;
    switch (said.word) {
      case HintKind::keep:
        it.kept = said.level;
        it.kept_until = said.until;
        break;
      case HintKind::back:
        it.passes_until = it.passing == kBackSoon ? std::max(it.passes_until, said.until) : said.until;
        it.passing = kBackSoon;
        break;
      case HintKind::ended:
        it.passing = kLeavesFirst;
        it.passes_until = said.until;
        break;
      case HintKind::waits:
        if (it.num_waiting < std::numeric_limits<std::uint16_t>::max()) ++it.num_waiting;
        it.waits_until = std::max(it.waits_until, said.until);
        break;
      case HintKind::turn:
        if (it.num_waiting > 0) --it.num_waiting;
        break;
    }
    return it.at(now);
  }
};

}  // namespace kvtier::policy
