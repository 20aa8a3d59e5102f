// The seam of policies in a tier of a running cache: told of what happens there, they say what is
// let in and what leaves.
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

// A request tells once what it asks for, all of its prompt. What is not resident is expected then,
// and may come in any order and at any time; what nobody has asked for, such as the blocks of an
// answer, lies behind the block in front of it. A block with resident ones behind it does not leave,
// nor does one of which the keeper says so. Blocks may be gone otherwise, too.
//
// Blocks are called by the owner's numbers, their items: below 2**31, and nobody else's while a
// block is resident.
//
// The caller guarantees
//   a block that is resident was told of by `entered` and not yet of its end, by `next_victim` or
//   `left`; a block that may leave after it might not was told of by `let_go`.
class Live {
 public:
  // Where a block is in its prompt, for those who know.
  struct Place {
    Index parent;      // the item in front of it, kNone where that is not resident
    std::uint32_t at;  // blocks in front of it, resident or not
  };

  virtual ~Live() = default;

  // The tier has room for so many blocks from now on.
  virtual void set_capacity(std::size_t capacity) = 0;
  // There will be about so many blocks, with items below their number: memory for them is made now.
  // Once, before any request comes.
  virtual void expect(std::size_t) {}
  // The block so deep in a prompt is worth twice what the first one is; 0: all are worth the same.
  virtual void set_doubling(double) {}
  // A request begins. path: the names of its prefixes. found: the first items, those that are
  // resident.
  virtual void asked(std::span<const Key> path, std::span<const Index> found, double now) = 0;
  // A prompt goes on behind a prefix: blocks that nobody has asked for, such as those of an answer,
  // are expected there.
  virtual void continues(std::span<const Key> names, Key before) = 0;
  // Somebody says something of a prompt. path, found: as for `asked`. A word holds for what is
  // resident of it or expected. Never an order: where nothing else may leave, anything does.
  virtual void retain(std::span<const Key>, std::span<const Index>, const Said&, double) {}
  // Which of these blocks, which are not resident, are worth the room that they need: all that
  // `num_free` is enough for, then those that are worth more than what would leave. What lies behind
  // one that is not is not either. Appends their positions. Where too little may leave, that is not
  // looked at. least_chance: that a block is used before it leaves; it is not worth a write
  // otherwise, room or not.
  virtual void admit(std::span<const Key> names, std::size_t num_free, double least_chance,
                     std::vector<std::uint32_t>& which) = 0;
  // A block is resident. Without a place it is where it was asked for, or, where nobody has, behind
  // another item.
  virtual void entered(Key name, Index item, std::optional<Place> place, Index behind = kNone) = 0;
  // Nothing holds the block any more.
  virtual void let_go(Index) {}
  // The victims that follow are one eviction's.
  virtual void begin_evicting() {}
  // A block leaves. Its item, kNone where none may.
  virtual Index next_victim() = 0;
  // A block is gone that was not evicted.
  virtual void left(Index item) = 0;
  // The item in front of a resident one, kNone where that is not resident.
  virtual Index in_front_of(Index item) const = 0;

  virtual std::size_t num_blocks() const = 0;
  // Entries that are kept of blocks which have left: at most two per block of the capacity.
  virtual std::size_t num_history() const = 0;
  virtual std::size_t num_bytes() const = 0;
  // Throws std::logic_error where the policy disagrees with itself. O(all blocks).
  virtual void check() const = 0;
};

// Whether there is one of that name.
bool has_live(std::string_view name);
// By name; null where there is none of that name. capacity: in blocks, 1 or more. seed: for those
// that leave something to chance. keeper: of the blocks; it outlives the policy.
std::unique_ptr<Live> make_live(std::string_view name, std::size_t capacity, std::uint64_t seed,
                                const Keeper& keeper);

}  // namespace kvtier::policy
