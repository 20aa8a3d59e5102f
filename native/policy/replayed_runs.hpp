// The learned policy, driven by whole requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/named_blocks.hpp"
#include "policy/replayed.hpp"
#include "policy/run_policy.hpp"

namespace kvtier::policy {

class ReplayedRuns final : public Replayed {
 public:
  ReplayedRuns(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks)
      : capacity_(capacity), policy_(capacity, seed, doubles_at_blocks, names_) {}

  std::size_t request(std::span<const Key> path, double now) override;

  std::size_t num_blocks() const override { return policy_.num_blocks(); }
  std::size_t num_history() const override { return policy_.num_history(); }
  std::size_t num_bytes() const override {
    return sizeof(*this) + policy_.num_bytes() + names_.num_bytes();
  }
  void check() const override;

 private:
  void store(std::span<const Key> path);
  bool make_room(double gain);

  std::size_t capacity_;
  NamedBlocks names_;
  RunPolicy policy_;
  std::vector<Index> path_;  // the blocks of the request that are resident
};

}  // namespace kvtier::policy
