// Least recently used first, in a column of the trie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trie/nodes.hpp"

namespace kvtier::trie {

// A policy's view of the blocks of its column; `queued` is the policy's own mark.
class ColumnView {
 public:
  ColumnView(Nodes& nodes, std::size_t column) : nodes_(nodes), column_(column) {}

  const Node& node(Index index) const { return nodes_[index]; }
  BlockId id(Index index) const { return nodes_.id(index); }
  double last_use(Index index) const { return nodes_.standing(index, column_).last_use; }
  bool is_evictable(Index index, std::uint32_t num_gone = 0) const {
    return nodes_.is_evictable(index, column_, num_gone);
  }
  bool is_block(Index index) const { return nodes_.is_block(index); }
  State state(Index index) const { return nodes_.residency(index, column_).state; }
  bool& queued(Index index) const { return nodes_.residency(index, column_).queued; }

 private:
  Nodes& nodes_;
  std::size_t column_;
};

// Least recently used leaf first; of two used at the same moment, the one with the lower number.
//
// A heap has one entry per queued block. A use does not move the entry, so it costs nothing: the
// entry's time is a lower bound, and is corrected when the entry is at the top.
//
// A block is a candidate if it is ready, not leased, and no child in the column needs it; the trie
// knows that. A block that was offered and is no candidate any more stays queued until `victim`
// finds it. A queued block stays ready: it leaves the column as a victim, or after `withdraw`. Time
// never decreases.
class Lru {
 public:
  explicit Lru(ColumnView view) : view_(view) {}

  // Queue a block that has become a candidate.
  void offer(Index index);
  // Take the candidate to evict first from the queue; kNone if there is none.
  Index victim();
  // Remove a queued block that leaves the column otherwise. This is rare, so it searches the queue.
  void withdraw(Index index);
  std::size_t num_queued() const { return heap_.size() - (hole_ ? 1 : 0); }
  std::size_t num_bytes() const { return heap_.capacity() * sizeof(Entry); }
  // Throw BrokenPromise if the queue and the blocks disagree.
  void check() const;

 private:
  struct Entry {
    double last_use;
    BlockId block;

    Index index() const { return static_cast<Index>(block); }
    bool operator<(const Entry& other) const {
      return last_use < other.last_use || (last_use == other.last_use && block < other.block);
    }
  };

  void drop_top();
  void sift_down(std::size_t at);
  void sift_up(std::size_t at);

  ColumnView view_;
  std::vector<Entry> heap_;
  bool hole_ = false;  // the top was taken; its place goes to the next entry, often the parent
};

}  // namespace kvtier::trie
