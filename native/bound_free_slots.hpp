// The free slots of a tier: see kvtier.core.reference.free_slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "errors.hpp"
#include "packed.hpp"
#include "slots/free_slots.hpp"

namespace kvtier::bound {

inline constexpr std::uint64_t kMaxSlots = std::uint64_t{1} << 32;

inline std::size_t to_count(nb::handle value, const char* what, std::uint64_t most) {
  const long long count = PyLong_AsLongLong(value.ptr());
  if (count == -1 && PyErr_Occurred()) throw nb::python_error();
  if (count < 0 || static_cast<std::uint64_t>(count) > most)
    fail(PyExc_ValueError, "%s: %lld is not in 0 .. %llu", what, count,
         static_cast<unsigned long long>(most));
  return static_cast<std::size_t>(count);
}

class FreeSlots {
 public:
  explicit FreeSlots(nb::handle num_slots)
      : free_(made(to_count(num_slots, "num_slots", kMaxSlots - 1))) {}

  std::size_t num_free() const { return free_.num_free(); }
  std::size_t longest_run() const { return free_.longest_run(); }

  void open(nb::handle first, nb::handle end) {
    const std::size_t stop = to_count(end, "end", free_.num_slots());
    const std::size_t start = to_count(first, "first", stop);
    if (start < num_opened_)
      fail(PyExc_ValueError, "first: %zu; the slots up to %zu are open", start, num_opened_);
    free_.open(start, stop);
    num_opened_ = stop;
  }

  // first: the number of the first slot, as `freed` counts them.
  void free(nb::handle freed, nb::handle first) {
    std::vector<slots::Slot> these;
    const auto start = static_cast<slots::Slot>(to_count(first, "first", kMaxSlots - 1));
    checked([&] { Given(freed, "slots must be a sequence").slots(these); });
    for (slots::Slot& slot : these) {
      if (slot < start || slot - start >= num_opened_)
        fail(PyExc_ValueError, "slot %u is none of the %zu that are open", slot, num_opened_);
      slot -= start;
    }
    const std::size_t twice = free_.free(these);
    if (twice != free_.num_slots())
      fail(PyExc_AssertionError, "slot %zu was freed twice", twice);
  }

  nb::object take(nb::handle num_slots) {
    const std::size_t num = to_count(num_slots, "num_slots", free_.num_free());
    const std::vector<slots::Slot> taken = guarded([&] { return free_.take(num); });
    return numbers_of(taken);
  }

  slots::FreeSlots& core() { return free_; }

 private:
  static slots::FreeSlots made(std::size_t num_slots) {
    return guarded([&] { return slots::FreeSlots(num_slots); });
  }

  slots::FreeSlots free_;
  std::size_t num_opened_ = 0;
};

}  // namespace kvtier::bound
