// Binding of the tables of keys. Arguments are checked here and trusted inside.
#include <cstdint>
#include <memory>
#include <random>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "given_arrays.hpp"
#include "keys/key_table.hpp"
#include "keys/slot_table.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Slots = GivenArray<std::int64_t>;

// A one-dimensional array of keys.
class StridedKeys {
 public:
  explicit StridedKeys(nb::handle array) : buffer_(array) {
    const Py_buffer& view = buffer_.view();
    if (!buffer_.held())
      fail(PyExc_TypeError, "keys must be an array of V32, not %s",
           nb::type_name(array.type()).c_str());
    if (std::strcmp(view.format, "32x") != 0)
      fail(PyExc_TypeError, "keys must be an array of V32; its items have format '%s'",
           view.format);
    if (view.ndim != 1) fail(PyExc_ValueError, "keys must have one dimension, not %d", view.ndim);
  }

  const Py_buffer& view() const { return buffer_.view(); }
  std::size_t size() const { return static_cast<std::size_t>(view().shape[0]); }

 private:
  Buffer buffer_;
};

// One that is C-contiguous.
class KeyArray : public StridedKeys {
 public:
  explicit KeyArray(nb::handle array) : StridedKeys(array) {
    if (!PyBuffer_IsContiguous(&view(), 'C'))
      fail(PyExc_ValueError, "keys must be C-contiguous; pass numpy.ascontiguousarray(keys)");
  }

  const keys::Key* data() const { return static_cast<const keys::Key*>(view().buf); }
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

// Returns the slots of keys in a table.
template <typename Table>
Slots found_in(const Table& table, nb::handle keys) {
  const KeyArray key(keys);
  auto found = std::make_unique<std::int64_t[]>(key.size());
  table.find(key.data(), key.size(), found.get());
  return owned(std::move(found), key.size());
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

  Slots find(nb::handle keys) const { return found_in(table_, keys); }

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

class SlotTable {
 public:
  SlotTable(nb::handle keys, nb::handle slots)
      : keys_(keys),
        table_(static_cast<const std::byte*>(keys_.view().buf), stride_of(keys_), keys_.size(),
               secret()) {
    const Items<std::int64_t> slot("slots", slots);
    check(slot);
    guarded([&] { table_.put(slot.data(), slot.size()); });
  }

  std::size_t size() const { return table_.size(); }
  std::size_t num_bytes() const { return table_.num_bytes(); }
  Slots find(nb::handle keys) const { return found_in(table_, keys); }

  void put(nb::handle slots) {
    const Items<std::int64_t> slot("slots", slots);
    check(slot);
    guarded([&] { table_.put(slot.data(), slot.size()); });
  }

  void remove(nb::handle slots) {
    const Items<std::int64_t> slot("slots", slots);
    check(slot);
    table_.remove(slot.data(), slot.size());
  }

 private:
  static std::size_t stride_of(const StridedKeys& keys) {
    const Py_ssize_t stride = keys.view().strides[0];
    if (stride < 0) fail(PyExc_ValueError, "keys must not run backwards");
    if (keys.size() > keys::kMaxSlot) fail(PyExc_ValueError, "keys: more than 2**32 - 1");
    return static_cast<std::size_t>(stride);
  }

  void check(const Items<std::int64_t>& slot) const {
    for (std::size_t i = 0; i < slot.size(); ++i)
      if (slot.data()[i] < 0 || static_cast<std::size_t>(slot.data()[i]) >= keys_.size())
        fail(PyExc_ValueError, "slots[%zu]: %lld is not in 0 .. %lld", i,
             static_cast<long long>(slot.data()[i]), static_cast<long long>(keys_.size()) - 1);
  }

  StridedKeys keys_;
  keys::SlotTable table_;
};

}  // namespace

void bind_keys(nb::module_& module) {
  nb::class_<KeyTable>(module, "KeyTable", "Slots by key: see kvtier.core.reference.key_table.")
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
  nb::class_<SlotTable>(module, "SlotTable", "Slots by key: see kvtier.core.reference.slot_table.")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("keys").none(), nb::arg("slots").none())
      .def("__len__", &SlotTable::size, nb::lock_self())
      .def("num_bytes", &SlotTable::num_bytes, nb::lock_self())
      .def("find", &SlotTable::find, nb::arg("keys").none(), nb::lock_self(),
           nb::sig("def find(self, keys: NDArray[void]) -> NDArray[int64]"))
      .def("put", &SlotTable::put, nb::arg("slots").none(), nb::lock_self(),
           nb::sig("def put(self, slots: NDArray[int64]) -> None"))
      .def("remove", &SlotTable::remove, nb::arg("slots").none(), nb::lock_self(),
           nb::sig("def remove(self, slots: NDArray[int64]) -> None"));
}

}  // namespace kvtier
