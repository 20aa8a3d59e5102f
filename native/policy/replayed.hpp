// Interface of a policy that replays a trace: a tier of blocks, driven by whole requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "policy/numbers.hpp"

namespace kvtier::policy {

class Replayed {
 public:
  virtual ~Replayed() = default;
  Replayed() = default;
  Replayed(const Replayed&) = delete;
  Replayed& operator=(const Replayed&) = delete;

  // Replay a request for a prompt, by the names of its prefixes, at a time in seconds that never
  // decreases. Return how many of its first blocks were resident. Admitted blocks are resident
  // afterwards.
  virtual std::size_t request(std::span<const Key> path, double now) = 0;

  virtual std::size_t num_blocks() const = 0;
  // Return the number of entries for evicted blocks.
  virtual std::size_t num_history() const { return 0; }
  virtual std::size_t num_bytes() const = 0;
  // Return the number of blocks written to the tier so far.
  std::size_t num_stored() const { return num_stored_; }
  // Throws BrokenPromise if an invariant is broken. O(all blocks).
  virtual void check() const = 0;

 protected:
  std::size_t num_stored_ = 0;
};

// Returns the policy of that name; null if there is none. capacity: in blocks, 1 or more. seed: for
// policies that sample. doubles_at_blocks: depth at which a block is worth twice the first one of
// its prompt, growing linearly; 0: all are worth the same. Only `runs` uses it.
std::unique_ptr<Replayed> make_replayed(std::string_view name, std::size_t capacity,
                                        std::uint64_t seed, double doubles_at_blocks);

}  // namespace kvtier::policy
