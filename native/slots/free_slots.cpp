#include "slots/free_slots.hpp"

#include <algorithm>
#include <bit>

namespace kvtier::slots {

namespace {

// Bits first .. end - 1 of a word, 0 <= first < end <= 64.
std::uint64_t mask(std::size_t first, std::size_t end) {
  const std::uint64_t below_end = end == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1;
  return below_end & ~((std::uint64_t{1} << first) - 1);
}

// A bit wherever a run of `length` ones begins, 1 <= length <= 64.
std::uint64_t starts_of(std::uint64_t word, std::size_t length) {
  for (std::size_t missing = length - 1, step = 1; missing > 0; step *= 2) {
    const std::size_t shift = std::min(step, missing);
    word &= word >> shift;
    missing -= shift;
  }
  return word;
}

}  // namespace

FreeSlots::FreeSlots(std::size_t num_slots)
    : num_slots_(num_slots), words_((num_slots + kBits - 1) / kBits) {
  for (std::size_t size = words_.size(); size > 0; size = (size + 1) / 2) {
    levels_.emplace_back(size);
    if (size == 1) break;
  }
}

FreeSlots::Span FreeSlots::span_of(std::uint64_t word) {
  Span span;
  span.head = static_cast<std::uint32_t>(std::countr_one(word));
  span.tail = static_cast<std::uint32_t>(std::countl_one(word));
  for (; word != 0; word &= word << 1) ++span.longest;
  return span;
}

FreeSlots::Span FreeSlots::joined(const Span& left, const Span& right, std::size_t half) {
  Span span;
  span.head = left.head == half ? left.head + right.head : left.head;
  span.tail = right.tail == half ? right.tail + left.tail : right.tail;
  span.longest = std::max({left.longest, right.longest, left.tail + right.head});
  return span;
}

FreeSlots::Span FreeSlots::at(std::size_t level, std::size_t index) const {
  return index < levels_[level].size() ? levels_[level][index] : Span{};
}

void FreeSlots::set(std::size_t first, std::size_t end, bool is_free) {
  if (first == end) return;
  for (std::size_t slot = first; slot < end;) {
    const std::size_t word = slot / kBits;
    const std::size_t stop = std::min(end, (word + 1) * kBits);
    const std::uint64_t bits = mask(slot % kBits, stop - word * kBits);
    words_[word] = is_free ? words_[word] | bits : words_[word] & ~bits;
    slot = stop;
  }
  review(first / kBits, (end - 1) / kBits);
}

void FreeSlots::review(std::size_t first, std::size_t last) {
  for (std::size_t word = first; word <= last; ++word) levels_[0][word] = span_of(words_[word]);
  std::size_t half = kBits;
  for (std::size_t level = 1; level < levels_.size(); ++level, half *= 2) {
    first /= 2;
    last /= 2;
    bool has_changed = false;
    for (std::size_t index = first; index <= last; ++index) {
      const Span span = joined(at(level - 1, 2 * index), at(level - 1, 2 * index + 1), half);
      has_changed |= span != levels_[level][index];
      levels_[level][index] = span;
    }
    if (!has_changed) return;
  }
}

std::size_t FreeSlots::find(std::size_t length) const {
  std::size_t index = 0;
  for (std::size_t level = levels_.size() - 1; level > 0; --level) {
    const Span left = at(level - 1, 2 * index), right = at(level - 1, 2 * index + 1);
    const std::size_t middle = (2 * index + 1) * (kBits << (level - 1));
    if (left.longest >= length)
      index = 2 * index;
    else if (left.tail + right.head >= length)
      return middle - left.tail;
    else
      index = 2 * index + 1;
  }
  return index * kBits + static_cast<std::size_t>(std::countr_zero(starts_of(words_[index], length)));
}

void FreeSlots::open(std::size_t first, std::size_t end) {
  set(first, end, true);
  num_free_ += end - first;
}

std::size_t FreeSlots::free(const std::vector<Slot>& slots) {
  std::size_t done = 0;
  while (done < slots.size() && !is_free(slots[done])) {
    words_[slots[done] / kBits] |= std::uint64_t{1} << slots[done] % kBits;
    ++done;
  }
  if (done < slots.size()) {
    for (std::size_t i = 0; i < done; ++i)
      words_[slots[i] / kBits] &= ~(std::uint64_t{1} << slots[i] % kBits);
    return slots[done];
  }
  for (std::size_t i = 0; i < slots.size();) {
    const std::size_t word = slots[i] / kBits;
    while (i < slots.size() && slots[i] / kBits == word) ++i;
    review(word, word);
  }
  num_free_ += slots.size();
  return num_slots_;
}

std::vector<Slot> FreeSlots::take(std::size_t num_slots) {
  std::vector<Slot> taken;
  taken.reserve(num_slots);
  const bool fits = longest_run() >= num_slots;
  while (taken.size() < num_slots) {
    const std::size_t missing = num_slots - taken.size();
    const std::size_t first = find(fits ? missing : 1);
    std::size_t end = fits ? first + missing : first + 1;
    while (end - first < missing && end < num_slots_ && is_free(static_cast<Slot>(end))) ++end;
    for (std::size_t slot = first; slot < end; ++slot) taken.push_back(static_cast<Slot>(slot));
    set(first, end, false);
  }
  num_free_ -= num_slots;
  return taken;
}

}  // namespace kvtier::slots
