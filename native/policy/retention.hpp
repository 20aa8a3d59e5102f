// What somebody who knows has said of blocks: when they leave, compared with others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtier::policy {

// The lowest leaves first; of one level, what is worth least. 0 .. 100 are priorities.
using Level = std::uint8_t;
inline constexpr Level kLeavesFirst = 0;
inline constexpr Level kUsual = 50;
inline constexpr Level kHighest = 100;
inline constexpr Level kBackSoon = 101;
inline constexpr Level kWaitedFor = 102;
inline constexpr std::size_t kNumLevels = 103;

enum class Word : std::uint8_t {
  keep,   // has a level of its own, also when it was used again
  back,   // will be used soon; over when it was
  ended,  // what nobody else has of it will not be used any more; over if it is
  waits,  // a request waits for its turn
  turn,   // it does not wait any more
};
inline constexpr int kNumWords = 5;

// A word on places first .. end - 1 of a prompt. level: of `keep`. until: seconds, of all but `turn`.
// tenant: whose prompt it is, 0 where nobody knows.
struct Said {
  Word word;
  Level level;
  std::uint32_t first, end;
  double until;
  std::uint64_t tenant = 0;

  // Whether a client wants blocks to leave later than they would.
  bool raises() const {
    return word == Word::back || (word == Word::keep && level > kUsual);
  }
};

// Of a tier's blocks, the most that clients may have raised above the usual level: those of one
// tenant, and those of all. So what one client says can't crowd out what the others are worth.
inline constexpr std::size_t kTenantsShare = 4;  // one in so many
inline constexpr std::size_t kRaisedShare = 2;

// What was said of a run. Every word ends with its time.
struct Retention {
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double kept_until = -kNever;
  double passes_until = -kNever;
  double waits_until = -kNever;
  std::uint64_t tenant = 0;  // that raised it
  std::uint16_t num_waiting = 0;
  Level kept = kUsual;
  Level passing = kUsual;

  bool operator==(const Retention&) const = default;

  Level level() const {
    return num_waiting > 0 ? kWaitedFor : passing != kUsual ? passing : kept;
  }
  bool is_raised() const { return passing > kUsual || kept > kUsual; }
  // When a word of it is over next.
  double ends() const {
    double next = kNever;
    if (num_waiting > 0) next = std::min(next, waits_until);
    if (passing != kUsual) next = std::min(next, passes_until);
    if (kept != kUsual) next = std::min(next, kept_until);
    return next;
  }
  // Without what is over.
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
  Retention with(const Said& said, double now) const {
    Retention it = at(now);
    if (said.raises()) it.tenant = said.tenant;
    switch (said.word) {
      case Word::keep:
        it.kept = said.level;
        it.kept_until = said.until;
        break;
      case Word::back:
        it.passes_until = it.passing == kBackSoon ? std::max(it.passes_until, said.until) : said.until;
        it.passing = kBackSoon;
        break;
      case Word::ended:
        it.passing = kLeavesFirst;
        it.passes_until = said.until;
        break;
      case Word::waits:
        if (it.num_waiting < std::numeric_limits<std::uint16_t>::max()) ++it.num_waiting;
        it.waits_until = std::max(it.waits_until, said.until);
        break;
      case Word::turn:
        if (it.num_waiting > 0) --it.num_waiting;
        break;
    }
    return it.at(now);
  }
};

}  // namespace kvtier::policy
