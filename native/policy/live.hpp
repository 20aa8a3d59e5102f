// Interface of an eviction and admission policy for a tier of a running cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "policy/keeper.hpp"
#include "policy/retention.hpp"

namespace kvtier::policy {

// `asked` reports all blocks of a request's prompt, once. Blocks of it that are not resident are
// expected from then on, and may enter in any order and at any time. Blocks that were in no
// request, such as those of an answer, follow the block in front of them. A block is not evicted
// while blocks behind it are resident, or while the keeper forbids it. The owner may also remove
// blocks itself.
//
// An item is the owner's number of a block: below 2**31, and unique among resident blocks.
//
// The caller guarantees
//   `entered` has reported each resident block, whose end is reported by `next_victim` or `left`;
//   `let_go` reports each block that can be evicted after it could not.
class Live {
 public:
  // Position of a block in its prompt, if the caller knows it.
  struct Place {
    Index parent;      // the item in front of it, kNone where that is not resident
    std::uint32_t at;  // blocks in front of it, resident or not
  };

  virtual ~Live() = default;

  // Set the capacity of the tier, in blocks.
  virtual void set_capacity(std::size_t capacity) = 0;
  // Reserve memory for about this many blocks, with items below that number. Called once, before
  // the first request.
  virtual void expect(std::size_t) {}
  // Set the depth, in blocks, at which a block is worth twice the first one of its prompt; 0: all
  // are worth the same.
  virtual void set_doubling(double) {}
  // Report a request. path: the names of its prefixes. found: items of its first blocks, as far as
  // they are resident.
  virtual void asked(std::span<const Key> path, std::span<const Index> found, double now) = 0;
  // Report that a request uses, or is about to write, a state: blocks that it needs beside those of
  // its prompt. path, found: as for `asked`. first: number of blocks of the path that belong to the
  // prompt. front: name of the prompt's block whose KV the state continues. at_end: whether the
  // state is needed at the prompt's end, from which the next prompt probably continues.
  virtual void used_state(std::span<const Key> path, std::span<const Index> found,
                          std::uint32_t first, Key front, bool at_end, double now) = 0;
  // Report blocks that follow the prefix `before` and were in no request, such as those of an
  // answer. They are expected from now on.
  virtual void continues(std::span<const Key> names, Key before) = 0;
  // Apply a retention hint to the resident and expected blocks of a prompt. path, found: as for
  // `asked`. A hint never forbids eviction: if no other block can be evicted, these are.
  virtual void retain(std::span<const Key>, std::span<const Index>, const BlockHint&, double) {}
  // Append the positions of the blocks to admit, among `names`, none of which is resident. Blocks
  // are admitted while there are free slots, then if they are worth more than the blocks that would
  // be evicted for them. Blocks behind one that is not admitted are not admitted either. If too few
  // blocks can be evicted, values are not compared. least_chance: probability of a use before
  // eviction below which a block is not admitted, even to a free slot.
  virtual void admit(std::span<const Key> names, std::size_t num_free, double least_chance,
                     std::vector<std::uint32_t>& which) = 0;
  // Prefetch what `entered` reads of a block.
  virtual void prefetch(Key) const {}
  // Report that a block is resident. Without a place it takes the one in the request that expects
  // it, else the one after the item `behind`.
  virtual void entered(Key name, Index item, std::optional<Place> place, Index behind = kNone) = 0;
  // Report that the keeper does not hold the block any more.
  virtual void let_go(Index) {}
  // Begin an eviction, of which the following victims are a part.
  virtual void begin_evicting() {}
  // Evict a block and return its item; kNone if no block can be evicted.
  virtual Index next_victim() = 0;
  // Report that the owner has removed a block.
  virtual void left(Index item) = 0;
  // Return the item in front of a resident one; kNone if that is not resident.
  virtual Index in_front_of(Index item) const = 0;

  virtual std::size_t num_blocks() const = 0;
  // Number of entries for evicted blocks: at most two per block of the capacity.
  virtual std::size_t num_history() const = 0;
  virtual std::size_t num_bytes() const = 0;
  // Throws BrokenPromise if an invariant is broken. O(all blocks).
  virtual void check() const = 0;
};

// The policy that is no `Live`: least recently used first, in an order that an index keeps itself.
inline constexpr std::string_view kLru = "lru";

// The capacity of a new policy in blocks, until `set_capacity` is called.
inline constexpr std::size_t kUsualRoom = std::size_t{1} << 16;

// Whether there is a policy of that name.
bool has_live(std::string_view name);
// Returns the policy of that name, which must exist. keeper: owner of the blocks; it outlives the
// policy.
std::unique_ptr<Live> make_live(std::string_view name, const Keeper& keeper);

}  // namespace kvtier::policy
