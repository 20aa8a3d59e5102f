// The seam of policies that are replayed: a tier of blocks, driven by whole requests.
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

  // A request for a prompt, by the names of its prefixes, at a time in seconds that never runs
  // backwards. Returns how many of its first blocks were resident; what is worth it is resident
  // afterwards.
  virtual std::size_t request(std::span<const Key> path, double now) = 0;

  virtual std::size_t num_blocks() const = 0;
  // Entries that are kept of blocks which have left.
  virtual std::size_t num_history() const { return 0; }
  virtual std::size_t num_bytes() const = 0;
  // Blocks written to the tier since the beginning.
  std::size_t num_stored() const { return num_stored_; }
  // Throws std::logic_error where the policy disagrees with itself. O(all blocks).
  virtual void check() const = 0;

 protected:
  std::size_t num_stored_ = 0;
};

// By name; null where there is none of that name. capacity: in blocks, 1 or more. seed: for those
// that leave something to chance. doubles_at_blocks: the block this deep in a prompt is worth twice
// what the first one is, in proportion; 0: all are worth the same. Only `runs` looks at it.
std::unique_ptr<Replayed> make_replayed(std::string_view name, std::size_t capacity,
                                        std::uint64_t seed, double doubles_at_blocks);

}  // namespace kvtier::policy
