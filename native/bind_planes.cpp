// Bindings of byte planes. Arguments are checked here and trusted inside.
#include <cstdint>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "planes/planes.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

planes::Split checked_split(std::uint64_t num_bytes, long long width, long long base) {
  if (width != 1 && width != 2 && width != 4)
    fail(PyExc_ValueError, "width must be 1, 2 or 4, not %lld", width);
  if (num_bytes % (2 * static_cast<std::uint64_t>(width)) != 0)
    fail(PyExc_ValueError, "%llu bytes are no even number of elements of %lld",
         static_cast<unsigned long long>(num_bytes), width);
  if (width == 1 ? base != 0 : base < planes::kWhole || base > planes::kMaxBase)
    fail(PyExc_ValueError, "base %lld is out of range for width %lld", base, width);
  return {static_cast<std::size_t>(num_bytes), static_cast<int>(width), static_cast<int>(base)};
}

void check_planes(const planes::Split& split, std::uint64_t address, std::uint64_t high,
                  std::uint64_t low, std::uint64_t escapes, std::uint64_t num_escapes) {
  check_memory("address", address, split.num_bytes);
  check_memory("high", high, planes::high_bytes(split));
  check_memory("low", low, planes::low_bytes(split));
  check_memory("escapes", escapes, num_escapes);
}

std::pair<int, int> choose_planes(std::uint64_t address, std::uint64_t num_bytes) {
  check_memory("address", address, num_bytes);
  const nb::gil_scoped_release others_may_run;
  const planes::Plan plan = planes::choose(bytes_at(address), num_bytes);
  return {plan.width, plan.base};
}

std::ptrdiff_t split_planes(std::uint64_t address, std::uint64_t num_bytes, long long width,
                            long long base, std::uint64_t high, std::uint64_t low,
                            std::uint64_t escapes, std::uint64_t max_escapes) {
  const planes::Split split = checked_split(num_bytes, width, base);
  check_planes(split, address, high, low, escapes, max_escapes);
  const nb::gil_scoped_release others_may_run;
  return planes::split(bytes_at(address), split, bytes_at(high), bytes_at(low), bytes_at(escapes),
                        max_escapes);
}

bool join_planes(std::uint64_t address, std::uint64_t num_bytes, long long width, long long base,
                 std::uint64_t high, std::uint64_t low, std::uint64_t escapes,
                 std::uint64_t num_escapes) {
  const planes::Split split = checked_split(num_bytes, width, base);
  check_planes(split, address, high, low, escapes, num_escapes);
  const nb::gil_scoped_release others_may_run;
  return planes::join(bytes_at(address), split, bytes_at(high), bytes_at(low), bytes_at(escapes),
                       num_escapes);
}

}  // namespace

void bind_planes(nb::module_& module) {
  module.def(
      "choose_planes",
      [](std::uint64_t address, std::uint64_t num_bytes) {
        const auto [width, base] = choose_planes(address, num_bytes);
        return nb::make_tuple(width, base);
      },
      nb::arg("address"), nb::arg("num_bytes"),
      nb::sig("def choose_planes(address: int, num_bytes: int) -> tuple[int, int]"),
      "Width and base with which the fewest bits remain, by a sample; width 0 to split nothing.");
  module.def("split_planes", &split_planes, nb::arg("address"), nb::arg("num_bytes"),
             nb::arg("width"), nb::arg("base"), nb::arg("high"), nb::arg("low"),
             nb::arg("escapes"), nb::arg("max_escapes"),
             nb::sig("def split_planes(address: int, num_bytes: int, width: int, base: int, "
                     "high: int, low: int, escapes: int, max_escapes: int) -> int"),
             "Split elements into planes; the number of escapes, or -1 for too many.");
  module.def("join_planes", &join_planes, nb::arg("address"), nb::arg("num_bytes"),
             nb::arg("width"), nb::arg("base"), nb::arg("high"), nb::arg("low"),
             nb::arg("escapes"), nb::arg("num_escapes"),
             nb::sig("def join_planes(address: int, num_bytes: int, width: int, base: int, "
                     "high: int, low: int, escapes: int, num_escapes: int) -> bool"),
             "Join planes; whether there were exactly num_escapes escapes.");
}

}  // namespace kvtier
