// How soon blocks will be used again, learned from what was used again before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvtier::policy {

// Blocks are put into classes by a few small features. Per class and age, uses are counted, and the
// time that blocks spent at that age: a hazard, with censoring, for what was forgotten or waits
// still was not used as long as it was known. A class with little history leans on the one above
// it, which has a feature less. The value of a block is its Gittins index: the best rate, over all
// horizons, of
//
//   P(used again before the horizon) / E[time until then, the horizon at most]      per second
//
// Source: Gittins, Bandit processes and dynamic allocation indices, 1979.
class ReuseModel {
 public:
  using Class = std::uint16_t;

  // Of a piece of a prompt, each below 16; in order of weight: it is the last that a class with
  // little history does without.
  static constexpr std::size_t kNumFeatures = 5;
  using Features = std::array<std::uint8_t, kNumFeatures>;

  // Blocks of which it is not known yet what will be.
  struct Waiting {
    Class cls;
    double age;
    double weight;
  };

  ReuseModel();

  // Made when it is first met.
  Class class_of(const Features& features);
  // A piece of this class was used again at this age (seconds), or was forgotten then. weight: of
  // the piece.
  void used(Class cls, double age, double weight) { count(classes_[cls].seen, age, weight, true); }
  void forgotten(Class cls, double age, double weight) {
    count(classes_[cls].seen, age, weight, false);
  }
  // Works out the hazards; what was seen before fades. O(classes + waiting).
  void learn(std::span<const Waiting> waiting);

  bool has_learned() const { return has_learned_; }
  double value(Class cls, double age);
  double value_of_new(Class cls) { return values_of(cls)[0]; }
  // That a new block is used again before it is worth no more than `price`.
  double chance(Class cls, double price);
  std::size_t num_classes() const { return classes_.size(); }
  std::size_t num_bytes() const { return classes_.capacity() * sizeof(Learned); }

 private:
  static constexpr std::size_t kNumAges = 44;
  using Row = std::array<double, kNumAges>;

  // Per age: uses; ends, which are uses and what was forgotten; the time that those that ended
  // there had spent there.
  struct Counts {
    Row uses{};
    Row ended{};
    Row beyond{};

    void add(const Counts& other);
    void fade();
  };
  struct Learned {
    Class above = 0;
    bool is_current = false;  // `values` are those of `hazards`
    Counts seen{};
    Row hazards{};
    Row values{};
  };

  std::size_t bucket(double age) const;
  void count(Counts& counts, double age, double weight, bool is_use) const;
  void work_out(Learned& it, const Counts& counts) const;
  const Row& values_of(Class cls);

  std::array<double, kNumAges + 1> edges_;  // seconds: of the buckets of ages
  std::vector<Learned> classes_;            // each after the one above it
  std::unordered_map<std::uint64_t, Class> numbers_;
  bool has_learned_ = false;
};

}  // namespace kvtier::policy
