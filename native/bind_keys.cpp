// Binding of the table of keys. Arguments are checked here and trusted inside.
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <random>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "keys/key_table.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Slots = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

// A one-dimensional, C-contiguous array of keys.
class KeyArray {
 public:
  explicit KeyArray(nb::handle array) : buffer_(array) {
    const Py_buffer& view = buffer_.view();
    if (!buffer_.held())
      fail(PyExc_TypeError, "keys must be an array of V32, not %s",
           nb::type_name(array.type()).c_str());
    if (std::strcmp(view.format, "32x") != 0)
      fail(PyExc_TypeError, "keys must be an array of V32; its items have format '%s'",
           view.format);
    if (view.ndim != 1) fail(PyExc_ValueError, "keys must have one dimension, not %d", view.ndim);
    if (!PyBuffer_IsContiguous(&view, 'C'))
      fail(PyExc_ValueError, "keys must be C-contiguous; pass numpy.ascontiguousarray(keys)");
  }

  std::size_t size() const { return static_cast<std::size_t>(buffer_.view().shape[0]); }
  const keys::Key* data() const { return static_cast<const keys::Key*>(buffer_.view().buf); }

 private:
  Buffer buffer_;
};

// Keys, and the slot of each.
struct Pairs {
  KeyArray key;
  Items<std::int64_t> slot;

  Pairs(nb::handle keys, nb::handle slots) : key(keys), slot("slots", slots) {
    if (key.size() != slot.size())
      fail(PyExc_ValueError, "keys and slots must have equal lengths, not %zu and %zu", key.size(),
           slot.size());
    for (std::size_t i = 0; i < slot.size(); ++i)
      if (slot.data()[i] < 0 || slot.data()[i] > keys::kMaxSlot)
        fail(PyExc_ValueError, "slots[%zu]: %lld is not in 0 .. 2**32 - 1", i,
             static_cast<long long>(slot.data()[i]));
  }
};

std::uint64_t secret() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

class KeyTable {
 public:
  KeyTable(nb::handle keys, nb::handle slots) : table_(secret()) {
    const Pairs pairs(keys, slots);
    guarded([&] {
      table_.reserve(pairs.key.size());
      table_.put(pairs.key.data(), pairs.slot.data(), pairs.key.size());
    });
  }

  std::size_t size() const { return table_.size(); }
  std::size_t num_bytes() const { return table_.num_bytes(); }

  Slots find(nb::handle keys) const {
    const KeyArray key(keys);
    auto found = std::make_unique<std::int64_t[]>(key.size());
    table_.find(key.data(), key.size(), found.get());
    std::int64_t* const data = found.get();
    const nb::capsule owner(
        data, [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
    found.release();
    return Slots(data, {key.size()}, owner);
  }

  void put(nb::handle keys, nb::handle slots) {
    const Pairs pairs(keys, slots);
    guarded([&] { table_.put(pairs.key.data(), pairs.slot.data(), pairs.key.size()); });
  }

  void remove(nb::handle keys, nb::handle slots) {
    const Pairs pairs(keys, slots);
    table_.remove(pairs.key.data(), pairs.slot.data(), pairs.key.size());
  }

 private:
  keys::KeyTable table_;
};

}  // namespace

void bind_keys(nb::module_& module) {
  nb::class_<KeyTable>(module, "KeyTable", "Slots by key: see kvtier._reference.key_table.")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("keys").none(), nb::arg("slots").none())
      .def("__len__", &KeyTable::size, nb::lock_self())
      .def("num_bytes", &KeyTable::num_bytes, nb::lock_self())
      .def("find", &KeyTable::find, nb::arg("keys").none(), nb::lock_self(),
           nb::sig("def find(self, keys: NDArray[void]) -> NDArray[int64]"))
      .def("put", &KeyTable::put, nb::arg("keys").none(), nb::arg("slots").none(), nb::lock_self(),
           nb::sig("def put(self, keys: NDArray[void], slots: NDArray[int64]) -> None"))
      .def("remove", &KeyTable::remove, nb::arg("keys").none(), nb::arg("slots").none(),
           nb::lock_self(),
           nb::sig("def remove(self, keys: NDArray[void], slots: NDArray[int64]) -> None"));
}

}  // namespace kvtier
