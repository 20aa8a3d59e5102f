// The slots that one engine of a node leases: see kvtier.index.slot_leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "keys/key_index.hpp"
#include "packed.hpp"

namespace kvtier::bound {

// A one-dimensional, C-contiguous array that may be written to, held for as long as this lives.
template <typename Item>
class Column {
 public:
  Column(const char* name, nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_CONTIG) != 0) throw nb::python_error();
    if (view_.ndim == 1 && view_.itemsize == sizeof(Item)) return;
    PyBuffer_Release(&view_);
    fail(PyExc_ValueError, "%s must have one dimension, and items of %zu bytes", name, sizeof(Item));
  }
  ~Column() { PyBuffer_Release(&view_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  std::size_t size() const { return static_cast<std::size_t>(view_.shape[0]); }
  Item& operator[](std::size_t at) const { return static_cast<Item*>(view_.buf)[at]; }

 private:
  Py_buffer view_{};
};

// Bytes that are filled one integer of eight bytes after the other.
class Int64Bytes {
 public:
  explicit Int64Bytes(std::size_t num)
      : bytes_(owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(8 * num)))) {}
  void set(std::size_t at, std::int64_t value) {
    std::memcpy(PyBytes_AS_STRING(bytes_.ptr()) + 8 * at, &value, 8);
  }
  const nb::object& bytes() const { return bytes_; }

 private:
  nb::object bytes_;
};

class SlotLeases {
 public:
  // index: outlives this. rows: kvtier.index.slot_leases.SlotRows.
  SlotLeases(keys::KeyIndex& index, std::size_t column, const nb::tuple& rows, nb::handle num_leases,
             std::uint64_t bit, std::uint64_t keeps)
      : index_(index),
        column_(column),
        blocks_("blocks", rows[0]),
        sources_("sources", rows[1]),
        generations_("generations", rows[2]),
        users_("users", rows[3]),
        last_use_("last_use", rows[4]),
        block_bytes_(to_number(nb::object(rows[5]).ptr(), "block_bytes")),
        segment_bytes_(to_number(nb::object(rows[6]).ptr(), "segment_bytes")),
        num_leases_("num_leases", num_leases),
        bit_(bit),
        keeps_(keeps) {
    const std::size_t num = blocks_.size();
    if (sources_.size() != num || generations_.size() != num || users_.size() != num ||
        num_leases_.size() != num || segment_bytes_ == 0)
      fail(PyExc_ValueError, "rows must have equal lengths, and segments some bytes");
  }

  // (slots, generations), as int64 bytes.
  nb::object lease(nb::handle blocks, double now) {
    to_time(now);
    Given(blocks, "blocks must be iterable").blocks(these_);
    Int64Bytes slots(these_.size()), generations(these_.size());
    checked([&] {
      for (std::size_t i = 0; i < these_.size(); ++i) {
        index_.lease(these_[i], column_);
        const std::size_t slot = index_.slot(these_[i], column_);
        trie::promise(slot < num_leases_.size(), "a slot that the room can't have");
        ++num_leases_[slot];
        users_[slot] |= bit_;
        const std::size_t segment = slot * block_bytes_ / segment_bytes_;
        if (segment < last_use_.size()) last_use_[segment] = now;
        slots.set(i, static_cast<std::int64_t>(slot));
        generations.set(i, generations_[slot]);
      }
    });
    return nb::make_tuple(slots.bytes(), generations.bytes());
  }

  // The blocks, for each lease that has ended.
  nb::object release(nb::handle slots) {
    if (!read_array(slots, slots_)) fail(PyExc_TypeError, "slots must be an array of int64");
    these_.clear();
    checked([&] {
      for (const std::uint64_t slot : slots_) {  // one below zero is large
        if (slot >= num_leases_.size() || num_leases_[slot] == 0) continue;
        if (--num_leases_[slot] == 0) users_[slot] &= keeps_;
        const auto block = static_cast<keys::BlockId>(blocks_[slot] - 1);
        index_.release(block, column_);
        sources_[slot] = 0;
        these_.push_back(block);
      }
    });
    return numbers_of(these_);
  }

 private:
  keys::KeyIndex& index_;
  std::size_t column_;
  Column<std::int64_t> blocks_;
  Column<std::int8_t> sources_;
  Column<std::int64_t> generations_;
  Column<std::uint64_t> users_;
  Column<double> last_use_;
  std::uint64_t block_bytes_, segment_bytes_;
  Column<std::uint32_t> num_leases_;
  std::uint64_t bit_, keeps_;
  // Kept from call to call, to spare allocations.
  std::vector<keys::BlockId> these_;
  std::vector<std::uint64_t> slots_;
};

}  // namespace kvtier::bound
