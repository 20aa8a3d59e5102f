// The learned policy, in a tier of a running cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policy/expected.hpp"
#include "policy/live.hpp"
#include "policy/run_policy.hpp"

namespace kvtier::policy {

// Expected blocks join the runs of their request when they enter. Blocks that were in no request
// join the run of the block in front of them.
class LiveRuns final : public RunPolicy, public Live {
 public:
  LiveRuns(std::size_t capacity, std::uint64_t seed, double doubles_at_blocks,
           const Keeper& keeper);

  void set_capacity(std::size_t capacity) override { RunPolicy::set_capacity(capacity); }
  void expect(std::size_t num_blocks) override { RunPolicy::expect(num_blocks); }
  std::size_t num_blocks() const override { return RunPolicy::num_blocks(); }
  std::size_t num_history() const override { return RunPolicy::num_history(); }
  std::size_t num_bytes() const override { return RunPolicy::num_bytes() + expected_.num_bytes(); }
  void check() const override { RunPolicy::check(); }

  void set_doubling(double at_blocks) override { RunPolicy::set_doubling(at_blocks); }
  void asked(std::span<const Key> path, std::span<const Index> found, double now) override;
  void used_state(std::span<const Key> path, std::span<const Index> found, std::uint32_t first,
                  Key front, bool at_end, double now) override;
  void continues(std::span<const Key> names, Key before) override;
  void retain(std::span<const Key> path, std::span<const Index> found, const BlockHint& said,
              double now) override;
  void admit(std::span<const Key> names, std::size_t num_free, double least_chance,
             std::vector<std::uint32_t>& which) override;
  void prefetch(Key name) const override { expected_.prefetch(name); }
  void entered(Key name, Index item, std::optional<Place> place, Index behind = kNone) override;
  void begin_evicting() override { victim_ = kNone; }
  Index next_victim() override;
  // Evicts up to `num_blocks` blocks. Appends their items.
  void evict(std::size_t num_blocks, std::vector<Index>& items);
  void left(Index item) override;
  Index in_front_of(Index item) const override { return blocks_.in_front_of(item); }

 private:
  // Class of a block that was in no request.
  Class unknown_class() { return model_.class_of({0, 1, 0, 0, 0}); }
  Index find(Key name) const { return blocks_.number(keeper_.find(name)); }
  void settle(std::span<const Index> found);
  void expect_runs(std::span<const Key> path, std::span<const Index> found);
  Index run_at(std::span<const Key> path, std::span<const Index> found, std::uint32_t at) const;
  std::uint32_t end_of_shared(std::span<const Index> found) const;
  Index split(std::span<const Key> path, std::span<const Index> found, Index run, std::uint32_t at);
  bool is_of_a_run(const Expected::Entry& entry) const;
  const Expected::Entry* entry_of(Key name) const;
  std::uint32_t place_of(Index block) const;
  Index run_in_front_of(std::span<const Key> names) const;
  Index pass_over_next();
  void follow_plan();
  void grow(Index run, Index block);
  void begin_run(Index block, std::uint32_t at);
  void leave_run(Index block);

  // A run, by its index and its number.
  struct Planned {
    Index run;
    std::uint64_t number;
  };

  Expected expected_;
  std::vector<Planned> planned_;  // victims of the blocks that were admitted, the first one last
  std::vector<Index> found_;      // kept from call to call, to spare allocations
};

}  // namespace kvtier::policy
