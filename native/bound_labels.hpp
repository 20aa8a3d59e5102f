// The labels of a prompt, as Python gives them.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "bound_values.hpp"
#include "trie/labels.hpp"

namespace kvtier::bound {

class LabelReader {
 public:
  // type: kvtier.keys.Labels.
  explicit LabelReader(nb::handle type)
      : type_(nb::borrow(type)), spec_(owned(PyUnicode_InternFromString("spec"))) {}

  // Calls use(labels) with the labels of a `Labels` (read from its token buffer) or of any sequence
  // of bytes.
  template <typename Use>
  void read(nb::handle labels, Use&& use) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(labels.ptr())) == type_.ptr()) {
      const nb::object spec = owned(PyObject_GetAttr(labels.ptr(), spec_.ptr()));
      std::size_t fields[4];  // block_bytes, blocks_per_chunk, first, number of blocks
      if (!PyTuple_Check(spec.ptr()) || PyTuple_GET_SIZE(spec.ptr()) != 5)
        fail(PyExc_TypeError, "Labels.spec has five fields");
      for (std::size_t i = 0; i < 4; ++i)
        fields[i] = to_index(PyTuple_GET_ITEM(spec.ptr(), static_cast<Py_ssize_t>(i) + 1));
      PyObject* const tokens = PyTuple_GET_ITEM(spec.ptr(), 0);
      const auto [width, per_chunk, first, num] = fields;
      const std::size_t end =
          per_chunk > 0 ? (first + num + per_chunk - 1) / per_chunk * per_chunk : 0;
      const auto must_hold = [&](std::size_t num_bytes) {
        if (width == 0 || per_chunk == 0 || end > num_bytes / width)
          fail(PyExc_ValueError, "Labels name blocks outside of their tokens: %R", spec.ptr());
      };
      if (PyBytes_CheckExact(tokens)) {
        const std::string_view text = to_bytes(tokens, "tokens");
        must_hold(text.size());
        trie::Labels path(reinterpret_cast<const std::byte*>(text.data()), width, per_chunk, first,
                          num);
        checked([&] { use(path); });
      } else {
        const TokenArray ids{nb::handle(tokens)};
        if (!ids.is_integer())
          fail(PyExc_TypeError, "tokens must be bytes or an array of integers, not %s",
               Py_TYPE(tokens)->tp_name);
        must_hold(4 * ids.size());
        packed_.resize(width * (end - first));
        trie::Labels path(ids.data(), width, per_chunk, first, num);
        path.unpacked(ids.type(), packed_.data());
        checked([&] { use(path); });
      }
    } else {
      const Items items(labels, "labels must be iterable");
      std::vector<trie::Label> list(items.size());
      for (std::size_t i = 0; i < list.size(); ++i) list[i] = to_label(items[i]);
      trie::Labels path{std::span<const trie::Label>(list)};
      checked([&] { use(path); });
    }
  }

 private:
  nb::object type_;
  nb::object spec_;
  std::vector<std::byte> packed_;  // kept from call to call, to spare allocations
};

}  // namespace kvtier::bound
