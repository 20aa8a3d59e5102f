// A policy that knows prompts, in a column of the trie.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "policy/keeper.hpp"
#include "policy/live.hpp"
#include "trie/policy.hpp"

namespace kvtier::trie {

// Every block that is written or ready counts as queued: the policy knows all of them, and sees by
// itself which may leave.
class LivePolicy final : public Policy, private policy::Keeper {
 public:
  // name: one that `make_live` knows.
  LivePolicy(ColumnView view, std::string_view name);

  bool knows_prompts() const override { return true; }
  void set_room(std::size_t num_blocks) override { live_->set_capacity(num_blocks); }
  void set_doubling(double at_blocks) override { live_->set_doubling(at_blocks); }
  void asked(std::span<const std::uint64_t> path, std::span<const Index> found,
             double now) override;
  void retain(std::span<const std::uint64_t> path, std::span<const Index> found,
              const policy::Said& said, double now) override;
  void admit(std::span<const std::uint64_t> names, std::size_t num_free, double least_chance,
             std::vector<std::uint32_t>& which) override {
    live_->admit(names, num_free, least_chance, which);
  }
  void entered(Index index) override;
  void offer(Index) override {}
  void let_go(Index index) override { live_->let_go(index); }
  void begin_evicting() override { live_->begin_evicting(); }
  Index victim() override;
  void withdraw(Index index) override;
  std::size_t num_queued() const override { return live_->num_blocks(); }
  std::size_t num_bytes() const override { return live_->num_bytes(); }
  void check() const override;

 private:
  policy::Key key(Index index) const override { return view_.node(index).hash; }
  bool may_leave(Index index, std::uint32_t num_gone) const override {
    return view_.is_evictable(index, num_gone);
  }
  policy::Index find(policy::Key) const override { return policy::kNone; }

  std::unique_ptr<policy::Live> live_;
};

}  // namespace kvtier::trie
