// Memory that grows in chunks: nothing moves, and no growth copies what is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trie/pages.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

// Rows of `stride` items each, found by number.
template <typename Item>
class Rows {
 public:
  explicit Rows(std::size_t stride) : stride_(stride) {}

  Item* row(Index index) { return chunks_[index >> kBits].get() + (index & kMask) * stride_; }
  const Item* row(Index index) const {
    return chunks_[index >> kBits].get() + (index & kMask) * stride_;
  }

  // Rows 0 .. index exist afterwards; new ones hold nothing defined.
  void reach(Index index) {
    while (chunks_.size() <= index >> kBits)
      chunks_.push_back(allocate_pages<Item>(kRows * stride_));
  }

  std::size_t num_bytes() const { return chunks_.size() * kRows * stride_ * sizeof(Item); }

 private:
  static constexpr std::size_t kBits = 12;
  static constexpr std::size_t kRows = std::size_t{1} << kBits;
  static constexpr Index kMask = kRows - 1;

  std::size_t stride_;
  std::vector<Pages<Item>> chunks_;
};

// One block in one tier.
struct Residency {
  double last_use;
  Slot slot;
  std::uint32_t leases;
  std::uint32_t num_children;  // children writing or ready in this tier
  State state;
  bool queued;  // the tier's policy has it in its queue, a candidate or not

  bool evictable() const { return state == State::ready && leases == 0 && num_children == 0; }
};

// One block, or the root of a namespace.
struct Node {
  std::uint64_t hash;          // of the whole prefix
  Index parent;                // kRoot for a root, kFree for a free node
  Index hint;                  // the child found last, or the next free node; may be outdated
  std::uint32_t generation;    // how often the place was used before
  std::uint32_t num_children;  // of any state
  std::uint32_t num_uses;
  std::uint32_t depth;  // blocks from the root on: 0 for a root
  std::uint32_t label;  // where its label begins, in units of the label arena
  std::uint32_t label_bytes;
};

inline constexpr Index kRoot = kNone - 1;
inline constexpr Index kFree = kNone - 2;

// Nodes and their residencies. Places are used again last in, first out, so that a path that took
// the places of an evicted one lies as that did: in order.
class Nodes {
 public:
  explicit Nodes(std::size_t num_tiers)
      : num_tiers_(num_tiers), nodes_(1), residencies_(num_tiers) {}

  std::size_t num_tiers() const { return num_tiers_; }
  Index end() const { return end_; }  // places used at any time are below
  std::size_t num_live() const { return num_live_; }
  std::size_t num_bytes() const { return nodes_.num_bytes() + residencies_.num_bytes(); }

  Node& operator[](Index index) { return *nodes_.row(index); }
  const Node& operator[](Index index) const { return *nodes_.row(index); }
  Residency* residencies(Index index) { return residencies_.row(index); }
  const Residency* residencies(Index index) const { return residencies_.row(index); }

  BlockId id(Index index) const {
    return static_cast<BlockId>((*this)[index].generation) << 32 | index;
  }
  void prefetch(Index index) const {
    __builtin_prefetch(nodes_.row(index));
    __builtin_prefetch(residencies_.row(index));
  }
  bool is_block(Index index) const { return (*this)[index].parent < kFree; }

  Index allocate() {
    Index index = free_;
    if (index != kNone) {
      free_ = (*this)[index].hint;
    } else {
      index = end_;
      if (index >= kFree) throw std::length_error("the index holds 2**32 blocks");
      nodes_.reach(index);
      residencies_.reach(index);
      (*this)[index].generation = 0;
      ++end_;
    }
    for (std::size_t tier = 0; tier < num_tiers_; ++tier)
      residencies(index)[tier] = {0.0, 0, 0, 0, State::absent, false};
    ++num_live_;
    return index;
  }

  void free(Index index) {
    Node& node = (*this)[index];
    node.parent = kFree;
    --num_live_;
    if (node.generation == kLastGeneration) return;  // never again: the number would repeat itself
    ++node.generation;
    node.hint = free_;
    free_ = index;
  }

 private:
  static constexpr std::uint32_t kLastGeneration = 0x7FFF'FFFF;

  std::size_t num_tiers_;
  Rows<Node> nodes_;
  Rows<Residency> residencies_;
  Index end_ = 0;
  Index free_ = kNone;
  std::size_t num_live_ = 0;
};

// The bytes of labels, in units of eight. Freed ones are used again for labels of the same length.
class LabelArena {
 public:
  std::uint32_t store(Label label);
  void free(std::uint32_t at, std::size_t num_bytes);
  const std::byte* data(std::uint32_t at) const {
    return chunks_[at >> kBits] + std::size_t{at & kMask} * kUnit;
  }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  static constexpr std::size_t kUnit = 8;
  static constexpr std::size_t kBits = 15;
  static constexpr std::uint32_t kMask = (std::uint32_t{1} << kBits) - 1;
  struct Freed {
    std::size_t num_units;
    std::vector<std::uint32_t> at;
  };

  static std::size_t units(std::size_t num_bytes) {
    return num_bytes == 0 ? 1 : (num_bytes + kUnit - 1) / kUnit;
  }
  Freed& freed(std::size_t num_units);
  std::uint32_t take(std::size_t num_units);

  std::vector<Pages<std::byte>> buffers_;
  std::vector<std::byte*> chunks_;  // a long label's buffer is several chunks
  std::size_t next_ = 0;            // the first unit that was never used
  std::size_t num_bytes_ = 0;
  std::vector<Freed> freed_;
};

}  // namespace kvtier::trie
