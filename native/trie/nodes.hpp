// Nodes, their residencies and their labels, in one arena.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/rows.hpp"
#include "trie/arena.hpp"
#include "trie/labels.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

// One block, or the root of a namespace.
struct Node {
  std::uint64_t hash;          // of the whole prefix
  Index parent;                // kRoot for a root, kFree for a free node
  Index hint;                  // the child found last, or the next free node; may be outdated
  std::uint32_t generation;    // how often the place was used before
  std::uint32_t num_children;  // of any state
  std::uint32_t depth;         // blocks from the root on: 0 for a root
  std::uint32_t label_bytes;
};

// State of one block in one column that a walk reads.
struct Residency {
  Slot slot;
  State state;
  bool queued;  // the column's policy has it in its queue, a candidate or not
};

inline constexpr double kNever = -1.0;  // before any time

// State of one block in one column that only uses and evictions read.
struct Standing {
  double last_use;             // kNever: of a block being written that was not used since
  std::uint32_t leases;
  std::uint32_t num_children;  // children writing or ready in this column, if they need it
};

inline constexpr Index kRoot = kNone - 1;
inline constexpr Index kFree = kNone - 2;

// Two rows per node. The first has the node, a residency per column and the label: a walk reads one
// piece of memory per block, whose address follows from the index alone. A label that is too long
// for the row is kept elsewhere. The second row has the number of uses, the root above the block,
// and a standing per column.
//
// Rows grow in chunks, so they never move and growth copies nothing. Free places are reused last
// in, first out, so a path that takes the places of an evicted one also lies in order.
class Nodes {
 public:
  explicit Nodes(std::size_t num_columns)
      : num_columns_(num_columns),
        walked_(label_at() + room_),
        standings_(standing_at(num_columns)) {}

  std::size_t num_columns() const { return num_columns_; }
  Index end() const { return end_; }  // places used at any time are below
  std::size_t num_live() const { return num_live_; }
  std::size_t num_bytes() const {
    return walked_.num_bytes() + standings_.num_bytes() + labels_.num_bytes();
  }

  Node& operator[](Index index) { return *walked_.at<Node>(index, 0); }
  const Node& operator[](Index index) const { return *walked_.at<Node>(index, 0); }
  Residency& residency(Index index, std::size_t column) {
    return *walked_.at<Residency>(index, residency_at(column));
  }
  const Residency& residency(Index index, std::size_t column) const {
    return *walked_.at<Residency>(index, residency_at(column));
  }
  const Residency* residencies(Index index) const { return &residency(index, 0); }
  Standing& standing(Index index, std::size_t column) {
    return *standings_.at<Standing>(index, standing_at(column));
  }
  const Standing& standing(Index index, std::size_t column) const {
    return *standings_.at<Standing>(index, standing_at(column));
  }
  std::uint32_t& num_uses(Index index) { return *standings_.at<std::uint32_t>(index, 0); }
  std::uint32_t num_uses(Index index) const { return *standings_.at<std::uint32_t>(index, 0); }
  // The node at the top of a block's path.
  Index& root(Index index) { return *standings_.at<Index>(index, sizeof(std::uint32_t)); }
  Index root(Index index) const { return *standings_.at<Index>(index, sizeof(std::uint32_t)); }
  Label label(Index index) const {
    const std::size_t size = (*this)[index].label_bytes;
    if (size <= room_) return {walked_.at<std::byte>(index, label_at()), size};
    return {labels_.data(*walked_.at<std::uint32_t>(index, label_at())), size};
  }
  // num_gone: number of its children in the column that count as gone.
  bool is_evictable(Index index, std::size_t column, std::uint32_t num_gone = 0) const {
    const Standing& it = standing(index, column);
    return residency(index, column).state == State::ready && it.leases == 0 &&
           it.num_children == num_gone;
  }

  BlockId id(Index index) const {
    return static_cast<BlockId>((*this)[index].generation) << 32 | index;
  }
  bool is_block(Index index) const { return (*this)[index].parent < kFree; }

  // Return how many first blocks of a run lie below each other in the places after `above`. It
  // reads only these places: a block may have other children.
  std::size_t follow(Index above, const Labels::Run& run) const;

  // Prefetch what a walk, or an eviction, reads of a node.
  void prefetch_walked(Index index) const { walked_.prefetch(index, label_at() + room_); }
  void prefetch_evicted(Index index) const {
    walked_.prefetch(index, label_at());
    standings_.prefetch(index, standing_at(num_columns_));
  }

  // Set the usual length of labels. Called before the first node is made.
  void expect_labels(std::size_t num_bytes) {
    constexpr std::size_t kMaxRoom = 128;  // rows of long labels would lie far from each other
    if (num_bytes <= kMaxRoom) room_ = std::max(kLeastRoom, (num_bytes + 7) / 8 * 8);
    walked_ = Rows(label_at() + room_);
  }

  // Make a node with its label, a generation, and no residency; the caller fills in the rest.
  Index allocate(Label label) {
    Index index = free_;
    if (index != kNone) {
      free_ = (*this)[index].hint;
    } else {
      index = end_;
      if (index >= kFree) throw std::length_error("the index holds 2**32 blocks");
      walked_.reach(index);
      standings_.reach(index);
      (*this)[index].generation = 0;
      ++end_;
    }
    (*this)[index].label_bytes = static_cast<std::uint32_t>(label.size);
    if (label.size > room_)
      *walked_.at<std::uint32_t>(index, label_at()) = labels_.store(label);
    else if (label.size > 0)
      std::memcpy(walked_.at<std::byte>(index, label_at()), label.data, label.size);
    for (std::size_t column = 0; column < num_columns_; ++column) {
      residency(index, column) = {0, State::absent, false};
      standing(index, column) = {0.0, 0, 0};
    }
    num_uses(index) = 0;
    ++num_live_;
    return index;
  }

  void free(Index index) {
    Node& node = (*this)[index];
    if (node.label_bytes > room_)
      labels_.free(*walked_.at<std::uint32_t>(index, label_at()), node.label_bytes);
    node.parent = kFree;
    --num_live_;
    if (node.generation == kLastGeneration) return;  // not reused: its block number would repeat
    ++node.generation;
    node.hint = free_;
    free_ = index;
  }

 private:
  static constexpr std::uint32_t kLastGeneration = 0x7FFF'FFFF;
  static constexpr std::size_t kLeastRoom = 8;

  static std::size_t residency_at(std::size_t column) {
    return sizeof(Node) + column * sizeof(Residency);
  }
  static std::size_t standing_at(std::size_t column) {
    return sizeof(std::uint32_t) + sizeof(Index) + column * sizeof(Standing);
  }
  std::size_t label_at() const { return residency_at(num_columns_); }

  std::size_t num_columns_;
  std::size_t room_ = kLeastRoom;  // for a label in its row, or for the position of a longer one
  Rows walked_;
  Rows standings_;
  LabelArena labels_;
  Index end_ = 0;
  Index free_ = kNone;
  std::size_t num_live_ = 0;
};

}  // namespace kvtier::trie
