// Least frequently used first, with ageing: a policy that others have, to compare with.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "policy/replayed.hpp"
#include "policy/tree.hpp"

namespace kvtier::policy {

// A block is worth its number of uses since it came, and what the last one that left was worth
// then. Leaves leave first, of those that are worth the same the deepest, then the one that was
// made first. Source: Arlitt et al., Evaluating content management techniques for Web proxy caches,
// 2000.
class Lfuda final : public Replayed {
 public:
  explicit Lfuda(std::size_t capacity) : capacity_(capacity) {}

  std::size_t request(std::span<const Key> path, double now) override;
  std::size_t num_blocks() const override { return blocks_.size(); }
  std::size_t num_bytes() const override;
  void check() const override;

 private:
  struct Mark {
    std::uint64_t worth;
    std::uint64_t request;  // that used it last
    std::uint64_t made;     // as which of all blocks
    std::uint32_t num_uses;
    std::uint32_t depth;
  };
  struct Leaf {
    std::uint64_t worth;
    std::uint32_t depth;
    std::uint64_t made;
    Index block;

    std::strong_ordering operator<=>(const Leaf& other) const {
      if (const auto by = worth <=> other.worth; by != 0) return by;
      if (const auto by = other.depth <=> depth; by != 0) return by;
      return made <=> other.made;
    }
    bool operator==(const Leaf&) const = default;
  };

  Leaf leaf(Index block) const {
    const Mark& mark = blocks_[block].mark;
    return {mark.worth, mark.depth, mark.made, block};
  }
  bool make_room();

  std::size_t capacity_;
  Tree<Mark> blocks_;
  std::set<Leaf> leaves_;  // that may leave: not those of the request that is being made
  std::uint64_t last_worth_ = 0;
  std::uint64_t num_requests_ = 0;
  std::vector<Index> path_;
};

}  // namespace kvtier::policy
