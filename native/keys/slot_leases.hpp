// The slots that one engine of a node leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "keys/key_index.hpp"

namespace kvtier::keys {

// Arrays with an entry per slot, which all users of a column share, and some of which lie in memory
// that other processes map: see kvtier.index.slot_leases.SlotArrays.
struct SlotArrays {
  std::span<std::int64_t> blocks;
  std::span<std::int8_t> sources;
  std::span<std::int64_t> generations;
  std::span<std::uint64_t> users;
  std::span<std::uint8_t> are_reserved;
  std::span<double> last_use;  // per segment
  std::uint64_t block_bytes;
  std::uint64_t segment_bytes;
};

class SlotLeases {
 public:
  // num_leases, is_reserved: per slot. bit: of this user. keeps: bits of `users` that stay when it
  // has released a slot.
  SlotLeases(KeyIndex& index, std::size_t column, const SlotArrays& arrays,
             std::span<std::uint32_t> num_leases, std::span<std::uint8_t> is_reserved,
             std::uint64_t bit, std::uint64_t keeps)
      : index_(index),
        column_(column),
        arrays_(arrays),
        num_leases_(num_leases),
        is_reserved_(is_reserved),
        bit_(bit),
        keeps_(keeps) {}

  // Lease blocks that are in the column. slots: of them.
  void lease(std::span<const BlockId> blocks, double now, std::vector<Slot>& slots);
  // See KeyIndex::lease_ready.
  void lease_ready(std::span<const KeyIndex::Key> keys, double now, bool all_or_none,
                   std::vector<State>& states, std::vector<Slot>& slots);
  // Release slots; slots that it has not leased are skipped. ended: the block of each ended lease.
  void release(std::span<const std::uint64_t> slots, std::vector<BlockId>& ended);

  // Reserve slots that this user will fill.
  void reserve(std::span<const Slot> slots);
  // End reservations, filled or given up. Slots without a reservation are skipped. which: the
  // positions of the others, each once; blocks: of these.
  void end_reserved(std::span<const std::uint64_t> slots, std::vector<std::uint64_t>& which,
                    std::vector<BlockId>& blocks);

  // Begin to write blocks of one prompt, in its order, which the column has not, to slots that were
  // free. blocks, hashes: of the keys.
  void reserve_new(std::span<const KeyIndex::Key> keys, std::span<const Slot> slots, double now,
                   std::vector<BlockId>& blocks, std::vector<std::uint64_t>& hashes);
  // End reservations whose slots have been filled with blocks of one prompt, in its order. Unless
  // all of them are this user's, each once, it returns false, and nothing has changed.
  bool commit(std::span<const std::uint64_t> slots, std::span<const std::uint64_t> depths,
              std::vector<BlockId>& blocks);

  std::size_t num_slots() const { return is_reserved_.size(); }
  std::int64_t generation(Slot slot) const { return arrays_.generations[slot]; }

 private:
  void note(std::span<const Slot> slots, double now);
  void note_use(std::span<const Slot> slots, double now);

  KeyIndex& index_;
  std::size_t column_;
  SlotArrays arrays_;
  std::span<std::uint32_t> num_leases_;
  std::span<std::uint8_t> is_reserved_;
  std::uint64_t bit_, keeps_;
};

}  // namespace kvtier::keys
