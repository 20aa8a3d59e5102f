// Binding of the free slots of a tier. Arguments are checked here and trusted inside.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bind.hpp"
#include "bound_free_slots.hpp"
#include "bound_slot_leases.hpp"

namespace nb = nanobind;

namespace kvtier {

using bound::FreeSlots;

namespace {

nb::object free_rows(nb::handle slots, nb::handle generations, nb::handle users) {
  std::vector<trie::Slot> these;
  bound::checked([&] { bound::Given(slots, "slots must be a sequence").slots(these); });
  const bound::Column<std::int64_t> grows("generations", generations);
  const bound::Column<std::uint64_t> marks("users", users);
  if (these.empty()) fail(PyExc_ValueError, "slots: there is none");
  const auto [low, high] = std::minmax_element(these.begin(), these.end());
  if (*high >= std::min(grows.items().size(), marks.items().size()))
    fail(PyExc_ValueError, "slot %u has no row", *high);
  for (const trie::Slot slot : these) {
    std::int64_t& generation = grows.items()[slot];
    generation = static_cast<std::int64_t>((static_cast<std::uint64_t>(generation) | 1) + 1);
    marks.items()[slot] = 0;
  }
  return nb::make_tuple(*low, *high);
}

}  // namespace

void bind_slots(nb::module_& module) {
  nb::class_<FreeSlots>(module, "FreeSlots", "Free slots: see kvtier.core.reference.free_slots.")
      .def(nb::init<nb::handle>(), nb::arg("num_slots").none())
      .def("num_free", &FreeSlots::num_free, nb::lock_self())
      .def("longest_run", &FreeSlots::longest_run, nb::lock_self())
      .def("open", &FreeSlots::open, nb::arg("first").none(), nb::arg("end").none(),
           nb::lock_self(), nb::sig("def open(self, first: int, end: int) -> None"))
      .def("free", &FreeSlots::free, nb::arg("slots").none(), nb::arg("first") = 0,
           nb::lock_self(), nb::sig("def free(self, slots: Sequence[int], first: int = 0) -> None"))
      .def("take", &FreeSlots::take, nb::arg("num_slots").none(), nb::lock_self(),
           nb::sig("def take(self, num_slots: int) -> Numbers"));
  module.def("free_rows", &free_rows, nb::arg("slots").none(), nb::arg("generations").none(),
             nb::arg("users").none());
}

}  // namespace kvtier
