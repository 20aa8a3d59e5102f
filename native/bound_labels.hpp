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
  // type: kvtier.core.keys.Labels.
  explicit LabelReader(nb::handle type)
      : type_(nb::borrow(type)), spec_(owned(PyUnicode_InternFromString("spec"))) {}

  // Calls use(labels) with the labels of a `Labels` (read from its token buffer) or of any sequence
  // of bytes. All that may run Python, and call us again, is over by then.
  template <typename Use>
  void read(nb::handle labels, Use&& use) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(labels.ptr())) == type_.ptr()) {
      const nb::object spec = owned(PyObject_GetAttr(labels.ptr(), spec_.ptr()));
      if (!PyTuple_Check(spec.ptr()) || PyTuple_GET_SIZE(spec.ptr()) != 5)
        fail(PyExc_TypeError, "Labels.spec has five fields");
      PyObject* const tokens = PyTuple_GET_ITEM(spec.ptr(), 0);
      const Fields fields(spec);
      const auto [width, per_chunk, first, num] = fields;
      if (PyBytes_CheckExact(tokens)) {
        const std::string_view text = to_bytes(tokens, "tokens");
        fields.end_within(text.size());
        trie::Labels path(reinterpret_cast<const std::byte*>(text.data()), width, per_chunk, first,
                          num);
        checked([&] { use(path); });
      } else {
        const TokenArray ids{nb::handle(tokens)};
        if (!ids.is_integer())
          fail(PyExc_TypeError, "tokens must be bytes or an array of integers, not %s",
               Py_TYPE(tokens)->tp_name);
        const std::size_t end = fields.end_within(kIdBytes * ids.size());
        if (width % kIdBytes != 0)
          fail(PyExc_ValueError, "Labels of %zu bytes a block are no whole number of token ids",
               width);
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
  static constexpr std::size_t kIdBytes = 4;  // of a packed one

  struct Fields {
    std::size_t block_bytes, blocks_per_chunk, first, num;

    explicit Fields(const nb::object& spec)
        : block_bytes(field(spec, 1)),
          blocks_per_chunk(field(spec, 2)),
          first(field(spec, 3)),
          num(field(spec, 4)) {}

    // The end of the last chunk, in blocks, if `num_bytes` of tokens reach as far.
    std::size_t end_within(std::size_t num_bytes) const {
      if (block_bytes > 0 && blocks_per_chunk > 0) {
        const std::size_t room = num_bytes / block_bytes;
        if (first <= room && num <= room - first) {
          const std::size_t over = (first + num) % blocks_per_chunk;
          const std::size_t missing = over == 0 ? 0 : blocks_per_chunk - over;
          if (missing <= room - first - num &&
              (num == 0 || blocks_per_chunk <= trie::kMaxLabelBytes / block_bytes))
            return first + num + missing;
        }
      }
      fail(PyExc_ValueError,
           "Labels name blocks outside of their tokens: block_bytes=%zu, blocks_per_chunk=%zu, "
           "first=%zu, num=%zu in %zu bytes",
           block_bytes, blocks_per_chunk, first, num, num_bytes);
    }

   private:
    static std::size_t field(const nb::object& spec, Py_ssize_t i) {
      const Py_ssize_t value = PyNumber_AsSsize_t(PyTuple_GET_ITEM(spec.ptr(), i), nullptr);
      if (value == -1 && PyErr_Occurred()) throw nb::python_error();
      if (value < 0) fail(PyExc_ValueError, "Labels name blocks by numbers from 0 on, not %zd", value);
      return static_cast<std::size_t>(value);
    }
  };

  nb::object type_;
  nb::object spec_;
  std::vector<std::byte> packed_;  // kept from call to call, to spare allocations
};

}  // namespace kvtier::bound
