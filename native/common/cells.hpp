// Hash table of numbers, by hash.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/pages.hpp"

namespace kvtier {

// A hash table of numbers below kNone, in parts. A part that grows moves a small share of all
// cells, so no call takes long. Parts have different sizes, so they do not grow together. At most
// 4/5 of the cells are used: a search for an absent number then reads 13 cells; with 2/3 used, 5. A
// tag and a number lie beside each other, so a look-up waits for memory once.
//
//   hash = | part: 7 or 10 bits | home: 32 bits | ... | short tag: 8 bits |
//   cell = | tag | number |
//
// The size of a tag trades memory for calls of hash_of:
//   4 bytes: the tag is the home. A part doubles, and closes a hole, without hashes.
//   2 bytes: cells of 6 bytes. The second byte is the distance of the cell from its home, so
// closing a
//            hole hardly ever needs a hash.
//   1 byte:  cells of 5 bytes, for tables whose size is known in advance.
//
// is_it(number): whether the number is the one searched for. hash_of(number): hash of a listed
// number; hash_of.prefetch(number), if it exists, prefetches what that reads. Not thread-safe.
template <typename Tag>
class Cells {
 public:
  using Number = std::uint32_t;
  struct Unasked {};  // in place of hash_of, if tags are long
  static constexpr Number kNone = 0xFFFF'FFFF;

  Cells() : parts_(std::size_t{1} << kPartBits) {}

  std::size_t size() const { return num_listed_; }
  std::size_t num_bytes() const {
    std::size_t sum = sizeof(*this) + parts_.size() * sizeof(Part);
    for (const Part& part : parts_) sum += part.num_cells * sizeof(Cell);
    return sum;
  }

  // Return a listed number; kNone if there is none.
  template <typename Test>
  Number find(std::uint64_t hash, Test&& is_it) const {
    const Part& part = part_of(hash);
    return part.num_cells == 0 ? kNone : part.cells[part.find(hash, is_it)].number();
  }

  void prefetch(std::uint64_t hash) const {
    const Part& part = part_of(hash);
    if (part.num_cells > 0) __builtin_prefetch(&part.cells[part.home(hash >> kHomeShift)]);
  }

  // Call visit(i, hash) for each i below num, in order, with hash = hash_at(i). Its cell has been
  // prefetched by then, and bring(number) called for the number that is probably in it.
  template <typename HashAt, typename Bring, typename Visit>
  void for_each(std::size_t num, HashAt&& hash_at, Bring&& bring, Visit&& visit) const {
    std::array<std::uint64_t, 2 * kAhead> hashes;
    for (std::size_t i = 0; i < num + 2 * kAhead; ++i) {
      std::uint64_t& hash = hashes[i % (2 * kAhead)];
      if (i >= 2 * kAhead) visit(i - 2 * kAhead, hash);
      if (i < num) prefetch(hash = hash_at(i));
      if (i < kAhead || i >= num + kAhead) continue;
      const auto first = [](Number) { return true; };
      if (const Number number = find(hashes[(i - kAhead) % (2 * kAhead)], first); number != kNone)
        bring(number);
    }
  }

  // Add a number that is not listed.
  template <typename HashOf = Unasked>
  void insert(std::uint64_t hash, Number number, HashOf&& hash_of = {}) {
    Part& part = part_of(hash);
    if (const std::size_t num = part.num_cells; is_full(part.num_listed + 1, num)) {
      const std::size_t first = kFewestCells + (hash >> kPartShift) % kFewestCells;
      // The odd sizes make the sizes of parts diverge.
      const std::size_t more = num > 0 ? 2 * num + hash % 2 : first;
      part.move(std::shared_ptr<Cell[]>(new Cell[more]), more, hash_of);
    }
    part.put(tag_of(hash), hash >> kHomeShift, number);
    ++part.num_listed;
    ++num_listed_;
  }

  // Replace the listed number, or add a new one.
  template <typename Test, typename HashOf = Unasked>
  void put(std::uint64_t hash, Test&& is_it, Number number, HashOf&& hash_of = {}) {
    Part& part = part_of(hash);
    if (is_full(part.num_listed + 1, part.num_cells) && find(hash, is_it) == kNone)
      return insert(hash, number, hash_of);
    Cell& cell = part.cells[part.find(hash, is_it)];
    if (cell.is_empty()) {
      cell.tag = part.tag_at(tag_of(hash), hash >> kHomeShift, &cell - part.cells.get());
      ++part.num_listed;
      ++num_listed_;
    }
    cell.one_more = number + 1;
  }

  // Remove a number, and return it; kNone if there is none.
  template <typename Test, typename HashOf = Unasked>
  Number erase(std::uint64_t hash, Test&& is_it, HashOf&& hash_of = {}) {
    Part& part = part_of(hash);
    if (part.num_cells == 0) return kNone;
    const std::size_t at = part.find(hash, is_it);
    const Number number = part.cells[at].number();
    if (number == kNone) return kNone;
    part.erase(at, hash_of);
    --part.num_listed;
    --num_listed_;
    return number;
  }

  // Reserve memory for about `num` numbers. Parts get different room for up to `spare` times as
  // many more, so that they do not grow at the same time. Slow: call it before the first request.
  template <typename HashOf = Unasked>
  void reserve(std::size_t num, double spare, HashOf&& hash_of = {}) {
    if (num == 0) return;
    // Parts fill unevenly: hardly any exceeds the mean by three standard deviations.
    const double mean = static_cast<double>(num) / static_cast<double>(parts_.size());
    const double in_part = mean + 3 * std::sqrt(mean) + 1;
    const auto num_cells = [&](std::size_t i) {
      const double more = spare * static_cast<double>(i) / static_cast<double>(parts_.size());
      return std::max(kFewestCells, static_cast<std::size_t>(1.25 * (1 + more) * in_part) + 1);
    };
    std::size_t at = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) at += num_cells(i);
    const std::shared_ptr<Cell[]> cells = zeroed_pages<Cell>(at);
    for (std::size_t i = parts_.size(); i-- > 0;) {
      at -= num_cells(i);
      if (parts_[i].num_cells < num_cells(i))
        parts_[i].move({cells, cells.get() + at}, num_cells(i), hash_of);
    }
  }

 private:
  static constexpr bool kTagIsHome = sizeof(Tag) == sizeof(std::uint32_t);
  static constexpr bool kKnowsDistance = sizeof(Tag) == sizeof(std::uint16_t);
  static constexpr std::size_t kFar = 0xFF;  // distances from here on are stored as this
  static constexpr int kPartBits = kTagIsHome ? 7 : 10;  // small parts if hashes are needed
  static constexpr int kPartShift = 64 - kPartBits;
  static constexpr int kHomeShift = kPartShift - 32;
  static constexpr std::size_t kFewestCells = 8;
  static constexpr std::size_t kAhead = 16;  // cells that are prefetched at a time
  static_assert(kTagIsHome || kKnowsDistance || sizeof(Tag) == 1);

  // All zeros: empty.
  struct [[gnu::packed]] Cell {
    Tag tag = 0;
    Number one_more = 0;  // its number + 1

    Number number() const { return one_more - 1; }
    bool is_empty() const { return one_more == 0; }
  };
  static_assert(sizeof(Cell) == sizeof(Tag) + sizeof(Number));

  static bool is_full(std::size_t num, std::size_t num_cells) { return 5 * num > 4 * num_cells; }
  static Tag tag_of(std::uint64_t hash) {
    return static_cast<Tag>(kTagIsHome ? hash >> kHomeShift : hash & 0xFF);
  }
  static bool is_tagged(Tag it, Tag tag) {
    return kKnowsDistance ? static_cast<std::uint8_t>(it) == tag : it == tag;
  }

  struct Part {
    std::shared_ptr<Cell[]> cells;  // its own, or a part of the cells reserved for all parts
    std::uint32_t num_cells = 0;
    std::uint32_t num_listed = 0;

    std::size_t next(std::size_t at) const { return at + 1 == num_cells ? 0 : at + 1; }
    std::size_t home(std::uint64_t bits) const {
      return static_cast<std::size_t>((bits & 0xFFFF'FFFF) * num_cells >> 32);
    }
    template <typename HashOf>
    std::uint64_t home_bits(const Cell& cell, HashOf&& hash_of) const {
      if constexpr (kTagIsHome) return cell.tag;
      else return hash_of(cell.number()) >> kHomeShift;
    }

    // Return the cell of a number, or the empty cell that ends the search.
    template <typename Test>
    std::size_t find(std::uint64_t hash, Test&& is_it) const {
      const Tag tag = tag_of(hash);
      std::size_t at = home(hash >> kHomeShift);
      for (; !cells[at].is_empty(); at = next(at))
        if (is_tagged(cells[at].tag, tag) && is_it(cells[at].number())) break;
      return at;
    }

    void put(Tag tag, std::uint64_t bits, Number number) {
      std::size_t at = home(bits);
      while (!cells[at].is_empty()) at = next(at);
      cells[at] = {tag_at(tag, bits, at), number + 1};
    }

    std::size_t distance(std::size_t from, std::size_t to) const {
      return to >= from ? to - from : to + num_cells - from;
    }
    Tag tag_at(Tag tag, std::uint64_t bits, std::size_t at) const {
      if constexpr (!kKnowsDistance) return tag;
      else return with_distance(tag, distance(home(bits), at));
    }
    static Tag with_distance(Tag tag, std::size_t far) {
      return static_cast<Tag>((tag & 0xFF) | std::min(far, kFar) << 8);
    }
    // Return the distance of a cell from its home.
    template <typename HashOf>
    std::size_t distance_of(std::size_t at, HashOf&& hash_of) const {
      if constexpr (kKnowsDistance)
        if (const std::size_t known = cells[at].tag >> 8; known < kFar) return known;
      return distance(home(home_bits(cells[at], hash_of)), at);
    }

    // Empty a cell. Later cells that it had displaced move back, so that no search ends too early.
    template <typename HashOf>
    void erase(std::size_t hole, HashOf&& hash_of) {
      for (std::size_t at = next(hole); !cells[at].is_empty(); at = next(at)) {
        const std::size_t far = distance_of(at, hash_of);
        const std::size_t back = distance(hole, at);
        if (far < back) continue;
        cells[hole] = cells[at];
        if constexpr (kKnowsDistance) cells[hole].tag = with_distance(cells[at].tag, far - back);
        hole = at;
      }
      cells[hole] = {};
    }

    // Move to other cells, all empty.
    template <typename HashOf>
    void move(std::shared_ptr<Cell[]> to, std::size_t num, HashOf&& hash_of) {
      std::swap(to, cells);
      const std::size_t num_before = num_cells;
      num_cells = static_cast<std::uint32_t>(num);
      for (std::size_t at = 0; at < num_before; ++at) {
        if constexpr (requires { hash_of.prefetch(Number{}); })
          if (const std::size_t next = at + kAhead; next < num_before && !to[next].is_empty())
            hash_of.prefetch(to[next].number());
        if (const Cell& cell = to[at]; !cell.is_empty())
          put(cell.tag, home_bits(cell, hash_of), cell.number());
      }
    }
  };

  Part& part_of(std::uint64_t hash) { return parts_[hash >> kPartShift]; }
  const Part& part_of(std::uint64_t hash) const { return parts_[hash >> kPartShift]; }

  std::vector<Part> parts_;
  std::size_t num_listed_ = 0;
};

}  // namespace kvtier
