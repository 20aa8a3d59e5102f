// Binding of the batched copy. Arguments are checked here and trusted inside.
#include <cstdint>
#include <memory>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "copy/copy_batch.hpp"
#include "copy/copy_checked.hpp"
#include "errors.hpp"
#include "given_arrays.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

// The sum of the sizes, if every fragment lies in memory and all of them could.
std::size_t checked_bytes(const copy::Fragments& list) {
  std::uint64_t num_bytes = 0;
  for (std::size_t i = 0; i < list.num; ++i) {
    const std::uint64_t size = list.size[i];
    for (const auto& [name, address] : {std::pair{"dst", list.dst[i]}, {"src", list.src[i]}})
      check_memory(name, i, address, size);
    if (size > kEndOfMemory - num_bytes)
      fail(PyExc_ValueError, "size: the first %zu fragments are more bytes than there is memory",
           i + 1);
    num_bytes += size;
  }
  return num_bytes;
}

// The three arrays of a copy.
class Batch {
 public:
  Batch(nb::handle dst, nb::handle src, nb::handle size)
      : dst_("dst", dst), src_("src", src), size_("size", size) {
    if (dst_.size() != src_.size() || dst_.size() != size_.size())
      fail(PyExc_ValueError, "dst, src and size must have equal lengths, not %zu, %zu and %zu",
           dst_.size(), src_.size(), size_.size());
  }

  copy::Fragments list() const { return {dst_.data(), src_.data(), size_.data(), size_.size()}; }

 private:
  Words dst_, src_, size_;
};

std::size_t copy_batch(nb::handle dst, nb::handle src, nb::handle size, long long threads) {
  const Batch batch(dst, src, size);
  const std::size_t num_threads = checked_threads(threads);
  const copy::Fragments list = batch.list();
  const std::size_t num_bytes = checked_bytes(list);
  const nb::gil_scoped_release others_may_run;
  guarded([&] { copy::copy_batch(list, num_bytes, num_threads); });
  return num_bytes;
}

Checksums copy_checked(nb::handle dst, nb::handle src, nb::handle size, long long pieces) {
  const Batch batch(dst, src, size);
  const copy::Fragments list = batch.list();
  if (pieces < 1 || list.num % static_cast<std::uint64_t>(pieces) != 0)
    fail(PyExc_ValueError, "%zu fragments are no whole number of blocks of %lld pieces", list.num,
         pieces);
  const std::size_t num_bytes = checked_bytes(list);
  const auto num_pieces = static_cast<std::size_t>(pieces);
  const std::size_t num_blocks = list.num / num_pieces;
  auto result = std::make_unique<std::uint32_t[]>(num_blocks);
  {
    const nb::gil_scoped_release others_may_run;
    copy::copy_checked(list, num_pieces, num_bytes, result.get());
  }
  return owned(std::move(result), num_blocks);
}

}  // namespace

void bind_copy(nb::module_& module) {
  // none(): None is refused here by name, as any other wrong type is.
  module.def("copy_batch", &copy_batch, nb::arg("dst").none(), nb::arg("src").none(),
             nb::arg("size").none(), nb::arg("threads") = 1,
             nb::sig("def copy_batch(dst: NDArray[uint64], src: NDArray[uint64], "
                     "size: NDArray[uint64], threads: int = 1) -> int"),
             "Copy size[i] bytes from address src[i] to address dst[i], for every i.");
  module.def("copy_checked", &copy_checked, nb::arg("dst").none(), nb::arg("src").none(),
             nb::arg("size").none(), nb::arg("pieces") = 1,
             nb::sig("def copy_checked(dst: NDArray[uint64], src: NDArray[uint64], "
                     "size: NDArray[uint64], pieces: int = 1) -> NDArray[uint32]"),
             "The same, and the crc32c of each block, which is so many pieces in a row.");
}

}  // namespace kvtier
