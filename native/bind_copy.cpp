// Binding of the batched copy. Arguments are checked here and trusted inside.
#include <cstdint>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "copy/copy_batch.hpp"
#include "errors.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

// The sum of the sizes, if every fragment lies in memory and all of them could.
std::size_t checked_bytes(const copy::Fragments& list) {
  std::uint64_t num_bytes = 0;
  for (std::size_t i = 0; i < list.num; ++i) {
    const std::uint64_t size = list.size[i];
    for (const auto& [name, address] : {std::pair{"dst", list.dst[i]}, {"src", list.src[i]}}) {
      if (!lies_in_memory(address, size))
        fail(PyExc_ValueError, "%s[%zu]: %llu bytes at address %llu do not lie in memory", name, i,
             static_cast<unsigned long long>(size), static_cast<unsigned long long>(address));
    }
    if (size > kEndOfMemory - num_bytes)
      fail(PyExc_ValueError, "size: the first %zu fragments are more bytes than there is memory",
           i + 1);
    num_bytes += size;
  }
  return num_bytes;
}

std::size_t copy_batch(nb::handle dst, nb::handle src, nb::handle size, long long threads) {
  const Words dst_words("dst", dst);
  const Words src_words("src", src);
  const Words size_words("size", size);
  if (dst_words.size() != src_words.size() || dst_words.size() != size_words.size())
    fail(PyExc_ValueError, "dst, src and size must have equal lengths, not %zu, %zu and %zu",
         dst_words.size(), src_words.size(), size_words.size());
  const std::size_t num_threads = checked_threads(threads);

  const copy::Fragments list{dst_words.data(), src_words.data(), size_words.data(),
                             size_words.size()};
  const std::size_t num_bytes = checked_bytes(list);
  const nb::gil_scoped_release others_may_run;
  guarded([&] { copy::copy_batch(list, num_bytes, num_threads); });
  return num_bytes;
}

}  // namespace

void bind_copy(nb::module_& module) {
  // none(): None is refused here by name, as any other wrong type is.
  module.def("copy_batch", &copy_batch, nb::arg("dst").none(), nb::arg("src").none(),
             nb::arg("size").none(), nb::arg("threads") = 1,
             nb::sig("def copy_batch(dst: NDArray[uint64], src: NDArray[uint64], "
                     "size: NDArray[uint64], threads: int = 1) -> int"),
             "Copy size[i] bytes from address src[i] to address dst[i], for every i.");
}

}  // namespace kvtier
