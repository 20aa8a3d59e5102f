// Numbers and keys side by side in memory, which are a sequence to Python: what takes and gives
// many blocks makes no object for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "trie/keys.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

// The largest one: blocks and slots are below, and numpy reads them with a sign.
inline constexpr std::uint64_t kMostNumber = ~std::uint64_t{0} >> 1;

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
    if (failed || value > kMostNumber) {
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

// Of any iterable, read in one go.
template <typename Item>
Packed<Item> packed_from(nb::handle from) {
  if (const Packed<Item>* const same = Packed<Item>::in(from)) return *same;
  const Items items(from, "items must be iterable");
  Packed<Item> made(items.size());
  for (std::size_t i = 0; i < items.size(); ++i)
    made.data()[i] = Packable<Item>::take(items[i]);
  return made;
}

// Blocks or slots as they are given: packed ones, or any iterable. All that may run Python, and
// call us again, is over when this is made.
class Given {
 public:
  Given(nb::handle numbers, const char* what) : packed_(Numbers::in(numbers)) {
    if (packed_ == nullptr) items_.emplace(numbers, what);
  }

  void blocks(std::vector<trie::BlockId>& read) const {
    if (packed_ != nullptr) {
      read.assign(packed_->data(), packed_->data() + packed_->size());
      return;
    }
    read.resize(items_->size());
    for (std::size_t i = 0; i < read.size(); ++i) read[i] = to_number((*items_)[i], "a block");
  }

  void slots(std::vector<trie::Slot>& read) const {
    read.resize(packed_ != nullptr ? packed_->size() : items_->size());
    for (std::size_t i = 0; i < read.size(); ++i)
      read[i] = packed_ != nullptr ? to_slot(packed_->data()[i]) : to_slot((*items_)[i]);
  }

 private:
  const Numbers* packed_;
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
