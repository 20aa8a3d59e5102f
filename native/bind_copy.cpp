// Binding of the batched copy. Arguments are checked here and trusted inside.
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "bind.hpp"
#include "copy/copy_batch.hpp"
#include "errors.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr long long kMaxThreads = 256;

template <typename... Args>
[[noreturn]] void fail(PyObject* type, const char* format, Args... args) {
  PyErr_Format(type, format, args...);
  throw nb::python_error();
}

// The buffer of a Python object, held for as long as this lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object)
      : held_(PyObject_GetBuffer(object.ptr(), &view_, PyBUF_RECORDS_RO) == 0) {
    if (!held_) PyErr_Clear();
  }
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool held() const { return held_; }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_{};
  bool held_;
};

// A one-dimensional, C-contiguous array of uint64: addresses or sizes.
class Words {
 public:
  Words(const char* name, nb::handle array) : buffer_(array) {
    const Py_buffer& view = buffer_.view();
    if (!buffer_.held())
      fail(PyExc_TypeError, "%s must be an array of uint64, not %s", name,
           nb::type_name(array.type()).c_str());
    const bool is_uint64 =
        view.itemsize == sizeof(std::uint64_t) &&
        (std::strcmp(view.format, "Q") == 0 || std::strcmp(view.format, "L") == 0);
    if (!is_uint64)
      fail(PyExc_TypeError, "%s must be an array of uint64; its items have format '%s'", name,
           view.format);
    if (view.ndim != 1)
      fail(PyExc_ValueError, "%s must have one dimension, not %d", name, view.ndim);
    if (!PyBuffer_IsContiguous(&view, 'C'))
      fail(PyExc_ValueError, "%s must be C-contiguous; pass numpy.ascontiguousarray(%s)", name,
           name);
  }

  std::size_t size() const { return static_cast<std::size_t>(buffer_.view().shape[0]); }
  const std::uint64_t* data() const {
    return static_cast<const std::uint64_t*>(buffer_.view().buf);
  }

 private:
  Buffer buffer_;
};

// The sum of the sizes, if every fragment lies in memory.
std::size_t checked_bytes(const copy::Fragments& list) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t num_bytes = 0;
  for (std::size_t i = 0; i < list.num; ++i) {
    const std::uint64_t size = list.size[i];
    if (size == 0) continue;
    for (const auto& [name, address] : {std::pair{"dst", list.dst[i]}, {"src", list.src[i]}}) {
      if (address == 0 || size > kMax - address)
        fail(PyExc_ValueError, "%s[%zu]: %llu bytes at address %llu do not lie in memory", name, i,
             static_cast<unsigned long long>(size), static_cast<unsigned long long>(address));
    }
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
  if (threads < 1 || threads > kMaxThreads)
    fail(PyExc_ValueError, "threads must be between 1 and %lld, not %lld", kMaxThreads, threads);

  const copy::Fragments list{dst_words.data(), src_words.data(), size_words.data(),
                             size_words.size()};
  const std::size_t num_bytes = checked_bytes(list);
  const nb::gil_scoped_release others_may_run;
  guarded([&] { copy::copy_batch(list, num_bytes, static_cast<std::size_t>(threads)); });
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
