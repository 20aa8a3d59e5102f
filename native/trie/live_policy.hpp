// A policy that knows prompts, in a column of the trie.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "policy/keeper.hpp"
#include "policy/live.hpp"
#include "trie/lru.hpp"

namespace kvtier::trie {

// Every block that is being written or ready counts as queued: the policy knows all of them, and
// finds out by itself which ones can be evicted.
class LivePolicy final : private policy::Keeper {
 public:
  // name: one that `make_live` knows.
  LivePolicy(ColumnView view, std::string_view name);

  LivePolicy(const LivePolicy&) = delete;
  LivePolicy& operator=(const LivePolicy&) = delete;

  policy::Live& live() { return *live_; }
  const policy::Live& live() const { return *live_; }

  // Report a block that begins to be written, or is ready at once.
  void entered(Index index);
  // Evict a block and return it; kNone if no block can be evicted.
  Index victim();
  // Report a block that leaves the column otherwise.
  void withdraw(Index index);

 private:
  policy::Key key(Index index) const override { return view_.node(index).hash; }
  bool may_leave(Index index, std::uint32_t num_gone) const override {
    return view_.is_evictable(index, num_gone);
  }
  policy::Index find(policy::Key) const override { return policy::kNone; }

  ColumnView view_;
  std::unique_ptr<policy::Live> live_;
};

}  // namespace kvtier::trie
