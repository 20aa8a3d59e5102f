// The seam of eviction policies inside the core: which block leaves a column first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "policy/retention.hpp"
#include "trie/nodes.hpp"

namespace kvtier::trie {

inline constexpr double kNever = -1.0;

// One use of a block in a column.
struct Use {
  double now;         // seconds; it is the block's `last_use` by now
  double before;      // its `last_use` until then, kNever for one that enters; the rest is the age
  bool ends_request;  // the last block of the path that was inserted, or touched at once
};

// What a policy may read of the blocks of its column, and its mark on them.
class ColumnView {
 public:
  ColumnView(Nodes& nodes, std::size_t column) : nodes_(nodes), column_(column) {}

  const Node& node(Index index) const { return nodes_[index]; }
  BlockId id(Index index) const { return nodes_.id(index); }
  std::uint32_t num_uses(Index index) const { return nodes_.num_uses(index); }
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

// One object per column. Which blocks are candidates (ready, not leased, and no child in the column
// that needs them) is the trie's business and read from the residency; the policy keeps a queue and
// is not told of every change: a block that was offered and is no candidate any more stays queued
// until `victim` meets it.
//
// The caller guarantees
//   `offer` for every block that becomes a candidate and is not queued; `used` after `last_use` and
//   `num_uses` of a block in the column have changed. A queued block stays ready: it leaves the
//   column as a victim, or after `withdraw`. Time never runs backwards.
// The implementer provides
//   `victim`: takes the candidate to lose first from the queue and gives it, kNone where there is
//   none. `queued` says whether a block is in the queue.
//
// A policy that knows prompts is told of more: of every request, before what it brings enters the
// column, and of every block that begins to be written, or is there at once. To it a block is queued
// from then on, until it leaves, whether it is a candidate or not; `let_go` says that it may have become
// one.
class Policy {
 public:
  explicit Policy(ColumnView view) : view_(view) {}
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  virtual bool knows_prompts() const { return false; }
  // The column has room for so many blocks.
  virtual void set_room(std::size_t) {}
  // The block so deep in a prompt is worth twice what the first one is.
  virtual void set_doubling(double) {}
  // A request begins. path: the hashes of its prefixes. found: the first blocks, as far as the
  // column has them.
  virtual void asked(std::span<const std::uint64_t>, std::span<const Index>, double) {}
  // Somebody says something of a prompt, which is given as to `asked`.
  virtual void retain(std::span<const std::uint64_t>, std::span<const Index>, const policy::Said&,
                      double) {}
  // Which of these blocks, which are not in the column, are worth their room there, and a write.
  // Appends their positions.
  virtual void admit(std::span<const std::uint64_t> names, std::size_t, double,
                     std::vector<std::uint32_t>& which) {
    for (std::uint32_t i = 0; i < names.size(); ++i) which.push_back(i);
  }
  virtual void entered(Index) {}
  virtual void let_go(Index) {}
  // The victims that follow are one eviction's.
  virtual void begin_evicting() {}

  virtual void used(Index, const Use&) {}
  virtual void offer(Index index) = 0;
  virtual Index victim() = 0;
  // A queued block leaves the column otherwise, which is rare: it may be searched for.
  virtual void withdraw(Index index) = 0;
  virtual std::size_t num_queued() const = 0;
  virtual std::size_t num_bytes() const = 0;
  // Throws BrokenPromise where the queue and the blocks disagree.
  virtual void check() const = 0;

 protected:
  ColumnView view_;
};

// By name; null where there is none of that name.
std::unique_ptr<Policy> make_policy(std::string_view name, ColumnView view);

// Least recently used leaf first; of two used at the same moment, the one with the lower number.
//
// A heap with one entry per queued block. A use does not move the entry: its time is a lower bound,
// made right when the entry comes to the top. So a use costs nothing here.
class Lru final : public Policy {
 public:
  using Policy::Policy;

  void offer(Index index) override;
  Index victim() override;
  void withdraw(Index index) override;
  std::size_t num_queued() const override { return heap_.size() - (hole_ ? 1 : 0); }
  std::size_t num_bytes() const override { return heap_.capacity() * sizeof(Entry); }
  void check() const override;

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

  std::vector<Entry> heap_;
  bool hole_ = false;  // the top was taken; its place goes to the next entry, often the parent
};

}  // namespace kvtier::trie
