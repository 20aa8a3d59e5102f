// Numbers and keys side by side in memory, which are a sequence to Python: what takes and gives
// many blocks makes no object for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "trie/keys.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

// The largest one: blocks and slots are below, and numpy reads them with a sign.
inline constexpr std::uint64_t kMaxNumber = ~std::uint64_t{0} >> 1;

// How an item looks from Python. format: as struct and numpy call it.
template <typename Item>
struct Packable;

template <>
struct Packable<std::uint64_t> {
  static constexpr const char* kName = "Numbers";
  static constexpr char kFormat[] = "q";
  static nb::object give(std::uint64_t item) { return number(item); }
  static std::uint64_t take(PyObject* item) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(item);
    const bool failed = value == static_cast<unsigned long long>(-1) && PyErr_Occurred();
    if (failed && !PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
    if (failed || value > kMaxNumber) {
      PyErr_Clear();
      fail(PyExc_ValueError, "%R is not in 0 .. 2**63 - 1", item);
    }
    return value;
  }
};

template <>
struct Packable<trie::Key> {
  static constexpr const char* kName = "Keys";
  static constexpr char kFormat[] = "32x";
  static nb::object give(const trie::Key& item) { return nb::bytes(item.data(), item.size()); }
  static trie::Key take(PyObject* item) {
    const std::string_view text = to_bytes(item, "a key");
    trie::Key key;
    if (text.size() != key.size())
      fail(PyExc_ValueError, "a key has %zu bytes, not %zu", key.size(), text.size());
    std::memcpy(key.data(), text.data(), key.size());
    return key;
  }
};

// Items that do not change. A part of them is a view of the same memory.
template <typename Item>
class Packed {
 public:
  Packed() = default;

  // As many, to be filled before anybody sees them.
  explicit Packed(std::size_t num)
      : memory_(owned(
            PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num * sizeof(Item))))),
        data_(reinterpret_cast<Item*>(PyBytes_AS_STRING(memory_.ptr()))),
        num_(num) {}

  std::size_t size() const { return num_; }
  Item* data() { return data_; }
  const Item* data() const { return data_; }

  Packed part(std::size_t first, std::size_t num) const {
    Packed some = *this;
    some.data_ += first;
    some.num_ = num;
    return some;
  }

  // The one that `object` is, or null.
  static const Packed* in(nb::handle object) {
    const bool is_one = Py_TYPE(object.ptr()) == type_ && nb::inst_ready(object);
    return is_one ? nb::inst_ptr<Packed>(object) : nullptr;
  }
  nb::object given() && { return nb::cast(std::move(*this)); }

  static void set_type(nb::handle type) { type_ = reinterpret_cast<PyTypeObject*>(type.ptr()); }

 private:
  inline static PyTypeObject* type_ = nullptr;

  nb::object memory_;
  Item* data_ = nullptr;
  std::size_t num_ = 0;
};

using Numbers = Packed<std::uint64_t>;
using Keys = Packed<trie::Key>;

// The numbers of an array of int64, copied: another thread may write to it. False if it is none.
inline bool read_array(nb::handle object, std::vector<std::uint64_t>& read) {
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) return false;
  const Buffer buffer(object);
  const Py_buffer& view = buffer.view();
  if (!buffer.held() || view.ndim != 1 || view.itemsize != 8 || view.format == nullptr ||
      (std::strcmp(view.format, "q") != 0 && std::strcmp(view.format, "l") != 0))
    return false;
  const auto* const first = static_cast<const std::uint64_t*>(view.buf);
  read.assign(first, first + view.shape[0]);
  return true;
}

// Of any iterable, read in one go.
template <typename Item>
Packed<Item> packed_from(nb::handle from) {
  if (const Packed<Item>* const same = Packed<Item>::in(from)) return *same;
  if constexpr (std::is_same_v<Item, std::uint64_t>) {
    std::vector<std::uint64_t> read;
    if (read_array(from, read)) {
      Packed<Item> made(read.size());
      for (std::size_t i = 0; i < read.size(); ++i) {
        if (read[i] > kMaxNumber)
          fail(PyExc_ValueError, "%lld is not in 0 .. 2**63 - 1", static_cast<long long>(read[i]));
        made.data()[i] = read[i];
      }
      return made;
    }
  }
  const Items items(from, "items must be iterable");
  Packed<Item> made(items.size());
  for (std::size_t i = 0; i < items.size(); ++i)
    made.data()[i] = Packable<Item>::take(items[i]);
  return made;
}

// Blocks or slots as they are given: packed ones, an array of int64, or any iterable. All that may
// run Python, and call us again, is over when this is made.
class Given {
 public:
  Given(nb::handle numbers, const char* what) {
    if (const Numbers* const packed = Numbers::in(numbers)) {
      numbers_ = {packed->data(), packed->size()};
    } else if (read_array(numbers, array_)) {
      numbers_ = array_;
    } else {
      items_.emplace(numbers, what);
    }
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  void blocks(std::vector<trie::BlockId>& read) const {
    if (!items_) {
      read.assign(numbers_.begin(), numbers_.end());
      return;
    }
    read.resize(items_->size());
    for (std::size_t i = 0; i < read.size(); ++i) read[i] = to_number((*items_)[i], "a block");
  }

  void slots(std::vector<trie::Slot>& read) const {
    read.resize(items_ ? items_->size() : numbers_.size());
    for (std::size_t i = 0; i < read.size(); ++i)
      read[i] = items_ ? to_slot((*items_)[i]) : to_slot(numbers_[i]);
  }

 private:
  std::span<const std::uint64_t> numbers_;
  std::vector<std::uint64_t> array_;
  std::optional<Items> items_;
};

// One of each of `values`.
template <typename Values, typename Make>
nb::object numbers_of(const Values& values, Make&& make) {
  Numbers numbers(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) numbers.data()[i] = make(values[i]);
  return std::move(numbers).given();
}

template <typename Values>
nb::object numbers_of(const Values& values) {
  return numbers_of(values, [](auto value) { return std::uint64_t{value}; });
}

}  // namespace kvtier::bound
