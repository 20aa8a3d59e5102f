#include "policy/reuse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

namespace kvtier::policy {

namespace {

constexpr double kFirstAge = 0.25;   // seconds: the first bucket is below it
constexpr double kFade = 0.98;       // decay of the counts per lesson
constexpr double kLeaning = 2.0;     // weight, in uses, of the class above
constexpr double kLeastShare = 0.1;  // of a bucket, spent in it by each piece that ended there
constexpr double kNothing = 1e-9;    // hazard before any observation

}  // namespace

ReuseModel::ReuseModel() {
  edges_[0] = 0.0;
  for (std::size_t at = 1; at <= kNumAges; ++at)  // two to each doubling
    edges_[at] = std::ldexp(at % 2 == 1 ? kFirstAge : kFirstAge * std::numbers::sqrt2,
                            static_cast<int>((at - 1) / 2));
  Learned all;
  for (std::size_t at = 0; at < kNumAges; ++at) all.hazards[at] = kNothing / (1.0 + edges_[at]);
  classes_.push_back(all);
}

ReuseModel::Class ReuseModel::class_of(const Features& features) {
  // The features as digits, the first before the others; a 1 in front encodes their number.
  std::uint64_t all = 1;
  for (const std::uint8_t feature : features) all = all << 4 | feature;
  if (const auto known = numbers_.find(all); known != numbers_.end()) return known->second;

  Class cls = 0;
  std::uint64_t name = 1;
  for (const std::uint8_t feature : features) {
    name = name << 4 | feature;
    const auto [it, is_new] = numbers_.try_emplace(name, static_cast<Class>(classes_.size()));
    if (is_new) {
      Learned made;
      made.above = cls;
      made.is_current = classes_[cls].is_current;
      made.hazards = classes_[cls].hazards;
      made.values = classes_[cls].values;
      classes_.push_back(made);
    }
    cls = it->second;
  }
  classes_[cls].features = features;
  return cls;
}

std::size_t ReuseModel::bucket(double age) const {
  if (age < edges_[1]) return 0;
  if (age >= edges_[kNumAges]) return kNumAges - 1;
  // 2 to the power of `octave`, or above it: at least 1.
  const std::uint64_t octave = (std::bit_cast<std::uint64_t>(age / kFirstAge) >> 52) - 1023;
  const std::size_t at = 2 * static_cast<std::size_t>(octave) + 1;
  return age < edges_[at + 1] ? at : at + 1;
}

void ReuseModel::count(Counts& counts, double age, double weight, bool is_use) const {
  const std::size_t at = bucket(age);
  if (is_use) counts.uses[at] += weight;
  counts.ended[at] += weight;
  const double spent = std::max(kLeastShare * (edges_[at + 1] - edges_[at]), age - edges_[at]);
  counts.beyond[at] += weight * spent;
}

void ReuseModel::Counts::add(const Counts& other) {
  for (std::size_t at = 0; at < kNumAges; ++at) {
    uses[at] += other.uses[at];
    ended[at] += other.ended[at];
    beyond[at] += other.beyond[at];
  }
}

void ReuseModel::Counts::fade() {
  for (Row* row : {&uses, &ended, &beyond})
    for (double& each : *row) each *= kFade;
}

void ReuseModel::learn(std::span<const Waiting> waiting) {
  std::vector<Counts> counts;
  counts.reserve(classes_.size());
  for (const Learned& each : classes_) counts.push_back(each.seen);
  for (const Waiting& each : waiting) count(counts[each.cls], each.age, each.weight, false);
  for (std::size_t cls = counts.size(); cls-- > 1;) counts[classes_[cls].above].add(counts[cls]);
  for (std::size_t cls = 0; cls < counts.size(); ++cls) {
    work_out(classes_[cls], counts[cls]);
    classes_[cls].seen.fade();
  }
  has_learned_ = true;
}

void ReuseModel::work_out(Learned& it, const Counts& counts) const {
  const bool is_top = &it == &classes_[0];
  double later = 0.0;  // pieces that ended at a greater age, so spent the whole bucket
  for (std::size_t at = kNumAges; at-- > 0;) {
    const double spent = later * (edges_[at + 1] - edges_[at]) + counts.beyond[at];
    later += counts.ended[at];
    if (is_top) {
      it.hazards[at] = (counts.uses[at] + kNothing) / (spent + 1.0);
    } else {
      const double above = classes_[it.above].hazards[at];
      it.hazards[at] = (counts.uses[at] + kLeaning) / (spent + kLeaning / above);
    }
  }
  it.is_current = false;
}

const ReuseModel::Row& ReuseModel::values_of(Class cls) {
  Learned& it = classes_[cls];
  if (it.is_current) return it.values;
  // The best horizon from an age on ends before the next stretch of ages with a lower rate, so a
  // stretch of a higher rate is joined. Fields of a stretch: P(used in it), E[time in it], P(not
  // used).
  struct Stretch {
    double used, spent, unused;
    bool is_worth_more_than(const Stretch& other) const {
      return used * other.spent > other.used * spent;
    }
  };
  std::array<Stretch, kNumAges> later;
  std::size_t num_later = 0;
  for (std::size_t at = kNumAges; at-- > 0;) {
    const double width = edges_[at + 1] - edges_[at];
    const double expected = it.hazards[at] * width;
    const double stays = std::exp(-expected);
    const double takes =
        expected < 1e-6 ? width * (1.0 - expected / 2.0) : (1.0 - stays) / it.hazards[at];
    Stretch from{1.0 - stays, takes, stays};
    while (num_later > 0 && later[num_later - 1].is_worth_more_than(from)) {
      const Stretch& next = later[--num_later];
      from.used += from.unused * next.used;
      from.spent += from.unused * next.spent;
      from.unused *= next.unused;
    }
    later[num_later++] = from;
    it.values[at] = from.used / from.spent;
  }
  it.is_current = true;
  return it.values;
}

double ReuseModel::chance(Class cls, double price) {
  const Row& values = values_of(cls);
  double expected = 0.0;
  for (std::size_t at = 0; at < kNumAges && values[at] > price; ++at)
    expected += classes_[cls].hazards[at] * (edges_[at + 1] - edges_[at]);
  return 1.0 - std::exp(-expected);
}

double ReuseModel::value(Class cls, double age) {
  const Row& values = values_of(cls);
  const std::size_t at = bucket(age);
  if (at + 1 == kNumAges) return values[at];
  const double beyond = std::min(1.0, (age - edges_[at]) / (edges_[at + 1] - edges_[at]));
  return values[at] * (1.0 - beyond) + values[at + 1] * beyond;
}

}  // namespace kvtier::policy
