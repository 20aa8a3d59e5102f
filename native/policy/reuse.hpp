// Model of the time until blocks are used again, learned from earlier uses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvtier::policy {

// Blocks are put into classes by a few small features. Per class and age, the model counts uses and
// the time that blocks spent at that age. Their ratio is a hazard rate. Forgotten and waiting
// blocks are censored observations: they were not used while they were known. A class with little
// history uses counts of the class above it, which has one feature less. The value of a block is
// its Gittins index: the best rate, over all horizons, of
//
//   P(used again before the horizon) / E[time until then, the horizon at most]      per second
//
// Source: Gittins, Bandit processes and dynamic allocation indices, 1979.
class ReuseModel {
 public:
  using Class = std::uint16_t;

  // Features of a piece of a prompt, each below 16, the most important first. A class with little
  // history drops the last ones.
  static constexpr std::size_t kNumFeatures = 5;
  using Features = std::array<std::uint8_t, kNumFeatures>;

  // Blocks that were neither used again nor forgotten yet.
  struct Waiting {
    Class cls;
    double age;
    double weight;
  };

  ReuseModel();

  // Return the class of features; it is made at its first use.
  Class class_of(const Features& features);
  // Return the features of a class that `class_of` returned.
  const Features& features(Class cls) const { return classes_[cls].features; }
  // Count a piece of this class that was used again, or forgotten, at this age in seconds. weight:
  // of the piece.
  void used(Class cls, double age, double weight) { count(classes_[cls].seen, age, weight, true); }
  void forgotten(Class cls, double age, double weight) {
    count(classes_[cls].seen, age, weight, false);
  }
  // Compute the hazards, and let old counts decay. O(classes + waiting).
  void learn(std::span<const Waiting> waiting);

  bool has_learned() const { return has_learned_; }
  double value(Class cls, double age);
  double value_of_new(Class cls) { return values_of(cls)[0]; }
  // Return the probability that a new block is used again before its value falls to `price`.
  double chance(Class cls, double price);
  std::size_t num_bytes() const { return classes_.capacity() * sizeof(Learned); }

 private:
  static constexpr std::size_t kNumAges = 44;
  using Row = std::array<double, kNumAges>;

  // Per age: uses; ends, which are uses and forgotten pieces; time that pieces which ended in this
  // bucket had spent in it.
  struct Counts {
    Row uses{};
    Row ended{};
    Row beyond{};

    void add(const Counts& other);
    void fade();
  };
  struct Learned {
    Class above = 0;
    Features features{};
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
  std::vector<Learned> classes_;            // each behind the one above it
  std::unordered_map<std::uint64_t, Class> numbers_;
  bool has_learned_ = false;
};

}  // namespace kvtier::policy
