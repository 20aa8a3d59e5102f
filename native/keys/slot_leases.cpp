#include "keys/slot_leases.hpp"

namespace kvtier::keys {

void SlotLeases::lease(std::span<const BlockId> blocks, double now, std::vector<Slot>& slots) {
  slots.resize(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    index_.lease(blocks[i], column_);
    slots[i] = index_.slot(blocks[i], column_);
    note({&slots[i], 1}, now);
  }
}

void SlotLeases::lease_ready(std::span<const KeyIndex::Key> keys, double now, bool all_or_none,
                             std::vector<State>& states, std::vector<Slot>& slots) {
  index_.lease_ready(keys, column_, all_or_none, states, slots);
  note(slots, now);
}

// Blocks of a prompt are often neighbours: their segment is looked for once.
void SlotLeases::note(std::span<const Slot> slots, double now) {
  std::uint64_t first = 1, end = 0;
  for (const Slot slot : slots) {
    promise(slot < num_leases_.size(), "a slot that the column can't have");
    ++num_leases_[slot];
    arrays_.users[slot] |= bit_;
    if (first <= slot && slot < end) continue;
    const std::uint64_t segment = slot * arrays_.block_bytes / arrays_.segment_bytes;
    first = slot;
    end = ((segment + 1) * arrays_.segment_bytes - 1) / arrays_.block_bytes + 1;
    if (segment < arrays_.last_use.size()) arrays_.last_use[segment] = now;
  }
}

void SlotLeases::reserve(std::span<const Slot> slots) {
  for (const Slot slot : slots) {
    promise(slot < is_reserved_.size(), "a slot that the column can't have");
    arrays_.users[slot] |= bit_;
    is_reserved_[slot] = 1;
  }
}

void SlotLeases::end_reserved(std::span<const std::uint64_t> slots,
                              std::vector<std::uint64_t>& which, std::vector<BlockId>& blocks) {
  which.clear();
  blocks.clear();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t slot = slots[i];
    if (slot >= is_reserved_.size() || !is_reserved_[slot]) continue;
    is_reserved_[slot] = 0;
    arrays_.users[slot] &= keeps_;
    which.push_back(i);
    blocks.push_back(static_cast<BlockId>(arrays_.blocks[slot] - 1));
  }
}

void SlotLeases::release(std::span<const std::uint64_t> slots, std::vector<BlockId>& ended) {
  ended.clear();
  for (const std::uint64_t slot : slots) {  // one below zero is large
    if (slot >= num_leases_.size() || num_leases_[slot] == 0) continue;
    if (--num_leases_[slot] == 0) arrays_.users[slot] &= keeps_;
    arrays_.sources[slot] = 0;
    ended.push_back(static_cast<BlockId>(arrays_.blocks[slot] - 1));
  }
  index_.release(ended, column_);
}

}  // namespace kvtier::keys
