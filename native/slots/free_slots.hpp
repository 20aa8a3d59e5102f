// Which slots of a tier are free: runs of neighbours, found in logarithmic time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::slots {

using Slot = std::uint32_t;

// A bit per slot, and above the words of bits a tree that knows of each span the free slots at its
// ends and the longest run within. Slots behind the last one are never free.
class FreeSlots {
 public:
  // None of them is free at first.
  explicit FreeSlots(std::size_t num_slots);

  std::size_t num_slots() const { return num_slots_; }
  std::size_t num_free() const { return num_free_; }
  // Of free neighbours.
  std::size_t longest_run() const { return levels_.empty() ? 0 : levels_.back()[0].longest; }

  // Slots first .. end - 1 are free from now on. None of them may be free.
  void open(std::size_t first, std::size_t end);
  // These are free again. Returns the first that was free already, then nothing has changed; or
  // num_slots().
  std::size_t free(const std::vector<Slot>& slots);
  // Takes num_slots slots, ascending: the first run that is long enough, else the lowest ones.
  // There must be as many.
  std::vector<Slot> take(std::size_t num_slots);

 private:
  static constexpr std::size_t kBits = 64;

  // What is free of a span of slots.
  struct Span {
    std::uint32_t head = 0;     // from the first slot on
    std::uint32_t tail = 0;     // up to the last slot
    std::uint32_t longest = 0;  // neighbours

    bool operator==(const Span&) const = default;
  };

  static Span span_of(std::uint64_t word);
  static Span joined(const Span& left, const Span& right, std::size_t half);
  Span at(std::size_t level, std::size_t index) const;

  bool is_free(Slot slot) const { return words_[slot / kBits] >> slot % kBits & 1; }
  void set(std::size_t first, std::size_t end, bool is_free);
  // Words first .. last have changed: the spans above them change with them.
  void review(std::size_t first, std::size_t last);

  // The first slot of the first run of `length`; there is one.
  std::size_t find(std::size_t length) const;

  std::size_t num_slots_;
  std::size_t num_free_ = 0;
  std::vector<std::uint64_t> words_;
  std::vector<std::vector<Span>> levels_;  // of single words, of two, of four ...; the last has one
};

}  // namespace kvtier::slots
