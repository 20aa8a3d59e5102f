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

void SlotLeases::note(std::span<const Slot> slots, double now) {
  for (const Slot slot : slots) {
    promise(slot < num_leases_.size(), "a slot that the column can't have");
    ++num_leases_[slot];
    arrays_.users[slot] |= bit_;
  }
  note_use(slots, now);
}

// Blocks of a prompt are often neighbours: their segment is looked for once.
void SlotLeases::note_use(std::span<const Slot> slots, double now) {
  std::uint64_t first = 1, end = 0;
  for (const Slot slot : slots) {
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

void SlotLeases::reserve_new(std::span<const KeyIndex::Key> keys, std::span<const Slot> slots,
                             double now, std::vector<BlockId>& blocks,
                             std::vector<std::uint64_t>& hashes) {
  blocks.clear();
  hashes.clear();
  index_.write_new(keys, column_, slots, blocks, hashes);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slot slot = slots[i];
    const auto generation = static_cast<std::uint64_t>(arrays_.generations[slot]);
    arrays_.generations[slot] = static_cast<std::int64_t>((generation + 1) | 1);
    arrays_.blocks[slot] = static_cast<std::int64_t>(blocks[i] + 1);
    arrays_.sources[slot] = 0;
    arrays_.are_reserved[slot] = 1;
  }
  reserve(slots);
  note_use(slots, now);
}

bool SlotLeases::commit(std::span<const std::uint64_t> slots, std::span<const std::uint64_t> depths,
                        std::vector<BlockId>& blocks) {
  blocks.clear();
  for (const std::uint64_t slot : slots) {
    const bool is_mine = slot < is_reserved_.size() && is_reserved_[slot] != 0;
    const auto block = static_cast<BlockId>(is_mine ? arrays_.blocks[slot] - 1 : -1);
    if (!is_mine || !arrays_.are_reserved[slot] ||
        index_.state(block, column_) != State::writing || index_.slot(block, column_) != slot) {
      for (std::size_t i = 0; i < blocks.size(); ++i) is_reserved_[slots[i]] = 1;
      return false;
    }
    is_reserved_[slot] = 0;  // a slot that is named again is none of this user's
    blocks.push_back(block);
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    arrays_.users[slots[i]] &= keeps_;
    arrays_.are_reserved[slots[i]] = 0;
    index_.set_depth(blocks[i], static_cast<std::uint32_t>(depths[i]));
  }
  for (std::size_t i = blocks.size(); i-- > 0;) index_.commit(blocks[i], column_);
  return true;
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
