// Bindings of the checksum. Arguments are checked here and trusted inside.
#include <cstdint>
#include <memory>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "crc/crc32c.hpp"
#include "errors.hpp"
#include "given_arrays.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

template <auto kChecksum>
std::uint32_t one(std::uint64_t address, std::uint64_t num_bytes, std::uint32_t seed) {
  if (!lies_in_memory(address, num_bytes))
    fail(PyExc_ValueError, "%llu bytes at address %llu do not lie in memory",
         static_cast<unsigned long long>(num_bytes), static_cast<unsigned long long>(address));
  const nb::gil_scoped_release others_may_run;
  return kChecksum(reinterpret_cast<const std::byte*>(address), num_bytes, seed);
}

Checksums crc32c_many(nb::handle addresses, nb::handle sizes, long long threads) {
  const Pieces pieces(addresses, sizes);
  const std::size_t num_threads = checked_threads(threads);
  auto result = std::make_unique<std::uint32_t[]>(pieces.num());
  {
    const nb::gil_scoped_release others_may_run;
    guarded([&] {
      crc::crc32c_many(pieces.address(), pieces.size(), pieces.num(), num_threads, result.get());
    });
  }
  return owned(std::move(result), pieces.num());
}

Checksums crc32c_rows(nb::handle rows) {
  const Buffer buffer(rows);
  const Py_buffer& view = buffer.view();
  if (!buffer.held())
    fail(PyExc_TypeError, "rows must be an array of uint8, not %s",
         nb::type_name(rows.type()).c_str());
  if (std::strcmp(buffer.format(), "B") != 0)
    fail(PyExc_TypeError, "rows must be an array of uint8; its items have format '%s'",
         buffer.format());
  if (view.ndim != 2) fail(PyExc_ValueError, "rows must have two dimensions, not %d", view.ndim);
  if (view.shape[1] > 1 && view.strides[1] != 1)
    fail(PyExc_ValueError, "rows must lie in one piece each, not with %zd bytes from item to item",
         view.strides[1]);
  const auto num = static_cast<std::size_t>(view.shape[0]);
  auto result = std::make_unique<std::uint32_t[]>(num);
  {
    const nb::gil_scoped_release others_may_run;
    crc::crc32c_rows(static_cast<const std::byte*>(view.buf), num,
                     static_cast<std::size_t>(view.shape[1]), view.strides[0], result.get());
  }
  return owned(std::move(result), num);
}

}  // namespace

void bind_crc(nb::module_& module) {
  module.def("crc32c", &one<&crc::crc32c>, nb::arg("address"), nb::arg("num_bytes"),
             nb::arg("seed") = 0,
             nb::sig("def crc32c(address: int, num_bytes: int, seed: int = 0) -> int"),
             "Checksum of num_bytes at address; seed: that of the bytes before them.");
  module.def("crc32c_table", &one<&crc::crc32c_table>, nb::arg("address"), nb::arg("num_bytes"),
             nb::arg("seed") = 0,
             nb::sig("def crc32c_table(address: int, num_bytes: int, seed: int = 0) -> int"),
             "crc32c as processors without an instruction for it compute it.");
  module.def("crc32c_many", &crc32c_many, nb::arg("addresses").none(), nb::arg("sizes").none(),
             nb::arg("threads") = 1,
             nb::sig("def crc32c_many(addresses: NDArray[uint64], sizes: NDArray[uint64], "
                     "threads: int = 1) -> NDArray[uint32]"),
             "Checksums of sizes[i] bytes at addresses[i], for every i.");
  module.def("crc32c_rows", &crc32c_rows, nb::arg("rows").none(),
             nb::sig("def crc32c_rows(rows: NDArray[uint8]) -> NDArray[uint32]"),
             "Checksum of each row of a uint8 array [n, width].");
  module.attr("CRC32C_KIND") = crc::crc32c_kind();
}

}  // namespace kvtier
