// Binding of the free slots of a tier. Arguments are checked here and trusted inside.
#include "bind.hpp"
#include "bound_free_slots.hpp"

namespace nb = nanobind;

namespace kvtier {

using bound::FreeSlots;

void bind_slots(nb::module_& module) {
  nb::class_<FreeSlots>(module, "FreeSlots", "Free slots: see kvtier.core.reference.free_slots.")
      .def(nb::init<nb::handle>(), nb::arg("num_slots").none())
      .def("num_free", &FreeSlots::num_free, nb::lock_self())
      .def("longest_run", &FreeSlots::longest_run, nb::lock_self())
      .def("open", &FreeSlots::open, nb::arg("first").none(), nb::arg("end").none(),
           nb::lock_self(), nb::sig("def open(self, first: int, end: int) -> None"))
      .def("free", &FreeSlots::free, nb::arg("slots").none(), nb::lock_self(),
           nb::sig("def free(self, slots: Sequence[int]) -> None"))
      .def("take", &FreeSlots::take, nb::arg("num_slots").none(), nb::lock_self(),
           nb::sig("def take(self, num_slots: int) -> Numbers"));
}

}  // namespace kvtier
