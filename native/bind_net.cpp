// Binding of what is received. Arguments are checked here and trusted inside.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "given_arrays.hpp"
#include "net/receive_values.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

std::string_view content_of(const nb::bytes& held) {
  return {static_cast<const char*>(held.data()), held.size()};
}

std::tuple<Checksums, nb::bytes, int> receive_values(int fd, nb::bytes line, nb::bytes held,
                                                     nb::handle addresses, nb::handle sizes,
                                                     long long pieces, long long heads,
                                                     long long due, double until) {
  const Pieces memory(addresses, sizes);
  if (pieces < 1 || memory.num() % static_cast<std::uint64_t>(pieces) != 0)
    fail(PyExc_ValueError, "%zu pieces are no whole number of values of %lld pieces", memory.num(),
         pieces);
  if (heads < 0 || heads > pieces)
    fail(PyExc_ValueError, "heads must be between 0 and pieces=%lld, not %lld", pieces, heads);
  if (line.size() == 0) fail(PyExc_ValueError, "line is empty");
  if (due < 0) fail(PyExc_ValueError, "due must not be negative: %lld", due);
  if (std::isnan(until)) fail(PyExc_ValueError, "until is not a number");
  const auto num_pieces = static_cast<std::size_t>(pieces);
  const net::Places places{memory.address(), memory.size(), memory.num() / num_pieces, num_pieces,
                           static_cast<std::size_t>(heads)};
  net::Received found;
  {
    const nb::gil_scoped_release others_may_run;
    found = guarded([&] {
      return net::receive_values(fd, content_of(line), content_of(held), places,
                                 static_cast<std::size_t>(due), until);
    });
  }
  const std::size_t num = found.crcs.size();
  auto crcs = std::make_unique<std::uint32_t[]>(num);
  std::copy(found.crcs.begin(), found.crcs.end(), crcs.get());
  return {owned(std::move(crcs), num), nb::bytes(found.rest.data(), found.rest.size()),
          found.error};
}

}  // namespace

void bind_net(nb::module_& module) {
  module.def("receive_values", &receive_values, nb::arg("fd"), nb::arg("line"), nb::arg("held"),
             nb::arg("addresses").none(), nb::arg("sizes").none(), nb::arg("pieces"),
             nb::arg("heads"), nb::arg("due"), nb::arg("until"),
             nb::sig("def receive_values(fd: int, line: bytes, held: bytes, "
                     "addresses: NDArray[uint64], sizes: NDArray[uint64], pieces: int, heads: int, "
                     "due: int, until: float) -> tuple[NDArray[uint32], bytes, int]"),
             "Receive values that begin with this line, each to its pieces; the crc32c of each.");
}

}  // namespace kvtier
