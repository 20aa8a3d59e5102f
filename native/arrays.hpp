// Arguments that are arrays, checked at the border.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace kvtier {

constexpr long long kMaxThreads = 256;

template <typename... Args>
[[noreturn]] void fail(PyObject* type, const char* format, Args... args) {
  PyErr_Format(type, format, args...);
  throw nanobind::python_error();
}

inline std::size_t checked_threads(long long threads) {
  if (threads < 1 || threads > kMaxThreads)
    fail(PyExc_ValueError, "threads must be between 1 and %lld, not %lld", kMaxThreads, threads);
  return static_cast<std::size_t>(threads);
}

// Processes have the lower half of the addresses: the upper one is the system's, and where negative
// numbers come out.
constexpr std::uint64_t kEndOfMemory = std::uint64_t{1} << 63;

// Whether `num_bytes` at `address` can lie in memory; no bytes lie anywhere.
inline bool lies_in_memory(std::uint64_t address, std::uint64_t num_bytes) {
  return num_bytes == 0 ||
         (address != 0 && num_bytes <= kEndOfMemory && address <= kEndOfMemory - num_bytes);
}

inline void check_memory(const char* name, std::uint64_t address, std::uint64_t num_bytes) {
  if (!lies_in_memory(address, num_bytes))
    fail(PyExc_ValueError, "%s: %llu bytes at address %llu do not lie in memory", name,
         static_cast<unsigned long long>(num_bytes), static_cast<unsigned long long>(address));
}

// For the piece of memory at a position of an array.
inline void check_memory(const char* name, std::size_t at, std::uint64_t address,
                         std::uint64_t num_bytes) {
  if (!lies_in_memory(address, num_bytes))
    fail(PyExc_ValueError, "%s[%zu]: %llu bytes at address %llu do not lie in memory", name, at,
         static_cast<unsigned long long>(num_bytes), static_cast<unsigned long long>(address));
}

inline std::byte* bytes_at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

// The buffer of a Python object, held for as long as this lives.
class Buffer {
 public:
  explicit Buffer(nanobind::handle object, int flags = PyBUF_RECORDS_RO)
      : held_(PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) {
    if (!held_) PyErr_Clear();
  }
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool held() const { return held_; }
  const Py_buffer& view() const { return view_; }
  const char* format() const { return view_.format == nullptr ? "B" : view_.format; }

 private:
  Py_buffer view_{};
  bool held_;
};

// A one-dimensional, C-contiguous array of 64-bit integers.
template <typename Item>
class Items {
  static_assert(sizeof(Item) == 8);
  static constexpr bool kSigned = std::numeric_limits<Item>::is_signed;
  static constexpr const char* kType = kSigned ? "int64" : "uint64";

 public:
  Items(const char* name, nanobind::handle array) : buffer_(array) {
    const Py_buffer& view = buffer_.view();
    if (!buffer_.held())
      fail(PyExc_TypeError, "%s must be an array of %s, not %s", name, kType,
           nanobind::type_name(array.type()).c_str());
    const char* const format = buffer_.format();
    const bool fits =
        view.itemsize == sizeof(Item) && (std::strcmp(format, kSigned ? "q" : "Q") == 0 ||
                                          std::strcmp(format, kSigned ? "l" : "L") == 0);
    if (!fits)
      fail(PyExc_TypeError, "%s must be an array of %s; its items have format '%s'", name, kType,
           format);
    if (view.ndim != 1)
      fail(PyExc_ValueError, "%s must have one dimension, not %d", name, view.ndim);
    if (!PyBuffer_IsContiguous(&view, 'C'))
      fail(PyExc_ValueError, "%s must be C-contiguous; pass numpy.ascontiguousarray(%s)", name,
           name);
  }

  std::size_t size() const { return static_cast<std::size_t>(buffer_.view().shape[0]); }
  const Item* data() const { return static_cast<const Item*>(buffer_.view().buf); }

 private:
  Buffer buffer_;
};

using Words = Items<std::uint64_t>;  // addresses or sizes

// Pieces of memory, sizes[i] bytes at addresses[i]; all of them could be there.
class Pieces {
 public:
  Pieces(nanobind::handle addresses, nanobind::handle sizes)
      : address_("addresses", addresses), size_("sizes", sizes) {
    if (address_.size() != size_.size())
      fail(PyExc_ValueError, "addresses and sizes must have equal lengths, not %zu and %zu",
           address_.size(), size_.size());
    for (std::size_t i = 0; i < num(); ++i) check_memory("addresses", i, address()[i], size()[i]);
  }

  std::size_t num() const { return size_.size(); }
  const std::uint64_t* address() const { return address_.data(); }
  const std::uint64_t* size() const { return size_.data(); }

 private:
  Words address_, size_;
};

}  // namespace kvtier
