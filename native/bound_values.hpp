// Conversion of Python's numbers, bytes, lists and arrays for the binding of the trie.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "policy/retention.hpp"
#include "trie/tokens.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

namespace nb = nanobind;

using kvtier::fail;

// Calls into the trie; misuse becomes the error that the Python twin raises for it.
template <typename Call>
auto checked(Call&& call) {
  try {
    return call();
  } catch (const trie::UnknownBlock& error) {
    fail(PyExc_KeyError, "block %llu is not known (any more)",
         static_cast<unsigned long long>(error.block));
  } catch (const BrokenPromise& error) {
    fail(PyExc_AssertionError, "%s", error.what());
  } catch (const nb::python_error&) {
    throw;
  } catch (const std::invalid_argument& error) {
    fail(PyExc_ValueError, "%s", error.what());
  } catch (const std::exception& error) {
    throw NativeError(error.what());
  }
}

inline nb::object owned(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

inline nb::object number(std::uint64_t value) { return owned(PyLong_FromUnsignedLongLong(value)); }

inline std::uint64_t to_number(PyObject* value, const char* what) {
  const unsigned long long result = PyLong_AsUnsignedLongLong(value);
  if (result == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
      PyErr_Clear();
      fail(PyExc_KeyError, "%s: %R is negative or too large", what, value);
    }
    throw nb::python_error();
  }
  return result;
}

// "At most so many": none where it is negative, and a number that is too large is as good as all.
inline std::size_t to_limit(nb::handle value) {
  const Py_ssize_t result = PyNumber_AsSsize_t(value.ptr(), nullptr);
  if (result == -1 && PyErr_Occurred()) throw nb::python_error();
  return result < 0 ? 0 : static_cast<std::size_t>(result);
}

// Seconds. What is not a number is in no order: a queue would never find its first.
inline double to_time(double now) {
  if (!std::isfinite(now))
    fail(PyExc_ValueError, "now must be a finite number of seconds, not %s",
         std::isnan(now) ? "nan" : now > 0 ? "inf" : "-inf");
  return now;
}

// kvtier.core.hints.BlockHint.
inline policy::BlockHint to_said(nb::handle said) {
  int word = 0, level = 0;
  long long first = 0, end = 0;
  double until = 0.0;
  if (!PyTuple_Check(said.ptr()))
    fail(PyExc_TypeError, "said must be a tuple, not %s", Py_TYPE(said.ptr())->tp_name);
  if (!PyArg_ParseTuple(said.ptr(), "iiLLd", &word, &level, &first, &end, &until))
    throw nb::python_error();
  if (word < 0 || word >= policy::kNumWords)
    fail(PyExc_ValueError, "word %d is not in 0 .. %d", word, policy::kNumWords - 1);
  if (level < 0 || level > policy::kHighest)
    fail(PyExc_ValueError, "level %d is not in 0 .. %d", level, int{policy::kHighest});
  if (first < 0 || first > end || end > std::numeric_limits<std::uint32_t>::max())
    fail(PyExc_ValueError, "%lld .. %lld are no places of a prompt", first, end);
  to_time(until);
  return {static_cast<policy::HintKind>(word), static_cast<policy::Level>(level),
          static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(end), until};
}

// So deep in a prompt a block is worth twice what the first one is; 0: all are worth the same.
inline double to_doubling(double at_blocks) {
  if (!(at_blocks >= 0.0) || std::isinf(at_blocks))
    fail(PyExc_ValueError, "doubles_at_blocks must be 0 or a number of blocks above it");
  return at_blocks;
}

inline trie::Slot to_slot(PyObject* value) {
  constexpr unsigned long long kMax = std::numeric_limits<trie::Slot>::max();
  const unsigned long long slot = PyLong_AsUnsignedLongLong(value);
  const bool failed = slot == static_cast<unsigned long long>(-1) && PyErr_Occurred();
  if (failed && !PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
  if (failed || slot > kMax) {
    PyErr_Clear();
    fail(PyExc_ValueError, "slot %R is not in 0 .. 2**32 - 1", value);
  }
  return static_cast<trie::Slot>(slot);
}

inline trie::Slot to_slot(std::uint64_t value) {
  if (value > std::numeric_limits<trie::Slot>::max())
    fail(PyExc_ValueError, "slot %llu is not in 0 .. 2**32 - 1",
         static_cast<unsigned long long>(value));
  return static_cast<trie::Slot>(value);
}

inline std::string_view to_bytes(PyObject* value, const char* what) {
  if (!PyBytes_Check(value))
    fail(PyExc_TypeError, "%s must be bytes, not %s", what, Py_TYPE(value)->tp_name);
  return {PyBytes_AS_STRING(value), static_cast<std::size_t>(PyBytes_GET_SIZE(value))};
}

// Names a block or a namespace; a node counts its bytes with 32 bits.
inline std::string_view to_name(PyObject* value, const char* what) {
  const std::string_view text = to_bytes(value, what);
  if (text.size() > trie::kMaxLabelBytes)
    fail(PyExc_ValueError, "%s has %zu bytes; %zu are the most", what, text.size(),
         trie::kMaxLabelBytes);
  return text;
}

inline trie::Label to_label(PyObject* value) {
  const std::string_view text = to_name(value, "a label");
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The items of any iterable, while this lives.
class Items {
 public:
  Items(nb::handle sequence, const char* what)
      : fast_(owned(PySequence_Fast(sequence.ptr(), what))) {}
  std::size_t size() const {
    return static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
  }
  PyObject* operator[](std::size_t i) const {
    return PySequence_Fast_GET_ITEM(fast_.ptr(), static_cast<Py_ssize_t>(i));
  }

 private:
  nb::object fast_;
};

// Lists and tuples of numbers, bytes and states: nothing in them refers back, so the collector of
// garbage needn't go through them, and takes no longer where prompts are long.
template <typename Values, typename Make>
nb::object list_of(const Values& values, Make&& make) {
  nb::object list = owned(PyList_New(static_cast<Py_ssize_t>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i)
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), make(values[i]).release().ptr());
  PyObject_GC_UnTrack(list.ptr());
  return list;
}

template <typename Values, typename Make>
nb::object tuple_of(const Values& values, Make&& make) {
  nb::object tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i)
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), make(values[i]).release().ptr());
  PyObject_GC_UnTrack(tuple.ptr());
  return tuple;
}

// The buffer of a C-contiguous array, or of any bytes.
class Buffer : public kvtier::Buffer {
 public:
  explicit Buffer(nb::handle object)
      : kvtier::Buffer(object, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) {}
};

// Token ids in the caller's type: one axis of integers of four or eight bytes, in native byte
// order.
class TokenArray {
 public:
  explicit TokenArray(nb::handle tokens) : buffer_(tokens) {
    if (!buffer_.held() || buffer_.view().ndim != 1 || buffer_.view().format == nullptr) return;
    const char* const format = buffer_.view().format;
    is_integer_ = std::strlen(format) == 1 && std::strchr("iIlLqQ", *format) != nullptr &&
                  (item_bytes() == 4 || item_bytes() == 8);
    is_signed_ = *format == 'i' || *format == 'l' || *format == 'q';
  }

  bool is_integer() const { return is_integer_; }
  trie::IdType type() const {
    if (item_bytes() == 8) return trie::IdType::int64;
    return is_signed_ ? trie::IdType::int32 : trie::IdType::uint32;
  }
  std::size_t size() const { return static_cast<std::size_t>(buffer_.view().len) / item_bytes(); }
  const std::byte* data() const { return static_cast<const std::byte*>(buffer_.view().buf); }

 private:
  std::size_t item_bytes() const { return static_cast<std::size_t>(buffer_.view().itemsize); }

  Buffer buffer_;
  bool is_integer_ = false;
  bool is_signed_ = false;
};

}  // namespace kvtier::bound
