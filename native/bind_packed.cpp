// Binding of packed numbers and keys.
#include <algorithm>
#include <cstring>
#include <vector>

#include "packed.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using namespace bound;

// first, first + 1, ... end - 1.
Numbers counted(nb::handle first, nb::handle end) {
  const std::uint64_t begin = Packable<std::uint64_t>::take(first.ptr());
  const std::uint64_t stop = Packable<std::uint64_t>::take(end.ptr());
  if (stop < begin)
    fail(PyExc_ValueError, "the end %R is before the first %R", end.ptr(), first.ptr());
  if (stop - begin > kMaxNumber / sizeof(std::uint64_t)) throw std::bad_alloc();
  Numbers made(stop - begin);
  for (std::uint64_t i = begin; i < stop; ++i) made.data()[i - begin] = i;
  return made;
}

template <typename Item>
Packed<Item> joined(nb::args parts) {
  std::vector<Packed<Item>> all;
  std::size_t num = 0;
  for (const nb::handle part : parts) {
    all.push_back(packed_from<Item>(part));
    num += all.back().size();
  }
  Packed<Item> made(num);
  Item* to = made.data();
  for (const Packed<Item>& part : all) to = std::copy_n(part.data(), part.size(), to);
  return made;
}

// What Python calls: errors are set, and nothing is thrown.
template <typename Item>
struct Slots {
  using It = Packed<Item>;
  using Look = Packable<Item>;

  // One that was never filled is empty.
  static const It& of(PyObject* self) {
    static const It none;
    const It* const it = It::in(self);
    return it == nullptr ? none : *it;
  }

  template <typename Make>
  static PyObject* guarded(Make&& make) {
    try {
      return make().release().ptr();
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    }
    return nullptr;
  }

  static Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(of(self).size()); }

  static PyObject* item(PyObject* self, Py_ssize_t at) {
    if (at < 0 || at >= length(self)) {
      PyErr_Format(PyExc_IndexError, "%s index out of range", Look::kName);
      return nullptr;
    }
    return guarded([&] { return Look::give(of(self).data()[at]); });
  }

  static PyObject* subscript(PyObject* self, PyObject* at) {
    const Py_ssize_t num = length(self);
    if (!PySlice_Check(at)) {
      const Py_ssize_t index = PyNumber_AsSsize_t(at, PyExc_IndexError);
      if (index == -1 && PyErr_Occurred()) return nullptr;
      return item(self, index < 0 ? index + num : index);
    }
    Py_ssize_t start = 0, stop = 0, step = 0;
    if (PySlice_Unpack(at, &start, &stop, &step) < 0) return nullptr;
    const auto size = static_cast<std::size_t>(PySlice_AdjustIndices(num, &start, &stop, step));
    return guarded([&] {
      if (step == 1) {
        const std::size_t first = size == 0 ? 0 : static_cast<std::size_t>(start);
        return of(self).part(first, size).given();
      }
      It made(size);
      for (std::size_t i = 0; i < size; ++i)
        made.data()[i] = of(self).data()[start + static_cast<Py_ssize_t>(i) * step];
      return std::move(made).given();
    });
  }

  // Equal to a list or tuple of the same items.
  static PyObject* compare(PyObject* self, PyObject* other, int how) {
    if (how != Py_EQ && how != Py_NE) Py_RETURN_NOTIMPLEMENTED;
    const It& mine = of(self);
    bool are_equal = true;
    if (const It* const theirs = It::in(other)) {
      are_equal = mine.size() == theirs->size() &&
                  std::equal(mine.data(), mine.data() + mine.size(), theirs->data());
    } else if (PyList_Check(other) || PyTuple_Check(other)) {
      // To compare may run Python, which may shorten the list.
      for (Py_ssize_t i = 0; are_equal; ++i) {
        are_equal = length(self) == PySequence_Fast_GET_SIZE(other);
        if (!are_equal || i == length(self)) break;
        const nb::object there = nb::borrow(PySequence_Fast_GET_ITEM(other, i));
        const nb::object here = nb::steal(item(self, i));
        if (!here.is_valid()) return nullptr;
        const int same = PyObject_RichCompareBool(here.ptr(), there.ptr(), Py_EQ);
        if (same < 0) return nullptr;
        are_equal = same == 1;
      }
    } else {
      Py_RETURN_NOTIMPLEMENTED;
    }
    return nb::bool_(are_equal == (how == Py_EQ)).release().ptr();
  }

  static PyObject* repr(PyObject* self) {
    const nb::object list = nb::steal(PySequence_List(self));
    return list.is_valid() ? PyUnicode_FromFormat("%s(%R)", Look::kName, list.ptr()) : nullptr;
  }

  static int buffer(PyObject* self, Py_buffer* view, int flags) {
    static Py_ssize_t stride = sizeof(Item);
    if ((flags & PyBUF_WRITABLE) == PyBUF_WRITABLE) {
      view->obj = nullptr;
      PyErr_Format(PyExc_BufferError, "%s do not change", Look::kName);
      return -1;
    }
    auto* const num = static_cast<Py_ssize_t*>(PyMem_Malloc(sizeof(Py_ssize_t)));
    if (num == nullptr) {
      view->obj = nullptr;
      PyErr_NoMemory();
      return -1;
    }
    *num = length(self);
    *view = {};
    view->obj = Py_NewRef(self);
    view->buf = const_cast<Item*>(of(self).data());
    view->len = *num * stride;
    view->itemsize = stride;
    view->readonly = 1;
    view->ndim = 1;
    if ((flags & PyBUF_FORMAT) == PyBUF_FORMAT) view->format = const_cast<char*>(Look::kFormat);
    view->shape = (flags & PyBUF_ND) == PyBUF_ND ? num : nullptr;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? &stride : nullptr;
    view->internal = num;
    return 0;
  }
  static void release(PyObject*, Py_buffer* view) { PyMem_Free(view->internal); }

  inline static PyType_Slot all[] = {
      {Py_sq_length, reinterpret_cast<void*>(length)},
      {Py_sq_item, reinterpret_cast<void*>(item)},
      {Py_mp_length, reinterpret_cast<void*>(length)},
      {Py_mp_subscript, reinterpret_cast<void*>(subscript)},
      {Py_tp_richcompare, reinterpret_cast<void*>(compare)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(buffer)},
      {Py_bf_releasebuffer, reinterpret_cast<void*>(release)},
      {0, nullptr},
  };
};

template <typename Item>
nb::class_<Packed<Item>> bind(nb::module_& module, const char* doc) {
  using It = Packed<Item>;
  nb::class_<It> made(module, Packable<Item>::kName, doc, nb::type_slots(Slots<Item>::all),
                      nb::is_final());
  It::set_type(made);
  made.def(
      "__init__", [](It* self, nb::handle items) { new (self) It(packed_from<Item>(items)); },
      nb::arg("items").none());
  // The other methods of Python's sequences, which are seldom used.
  made.def("__reduce__", [](nb::handle self) {
    return nb::make_tuple(nb::borrow(self.type()), nb::make_tuple(nb::list(self)));
  });
  const auto index = [](nb::handle self, nb::handle item) {
    return nb::list(self).attr("index")(item);
  };
  const auto count = [](nb::handle self, nb::handle item) {
    return nb::list(self).attr("count")(item);
  };
  made.def("index", index, nb::arg("item").none());
  made.def("count", count, nb::arg("item").none());
  made.def_static("joined", &joined<Item>);
  return made;
}

}  // namespace

void bind_packed(nb::module_& module) {
  bind<std::uint64_t>(module, "Numbers side by side: see kvtier.core.reference.packed.")
      .def_static("counted", &counted, nb::arg("first").none(), nb::arg("end").none());
  bind<trie::Key>(module, "Keys side by side: see kvtier.core.reference.packed.");
}

}  // namespace kvtier
