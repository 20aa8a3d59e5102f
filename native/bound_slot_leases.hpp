// The slots that one engine of a node leases: see kvtier.index.slot_leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "keys/slot_leases.hpp"
#include "node/messages.hpp"
#include "packed.hpp"

namespace kvtier::bound {

// A one-dimensional, C-contiguous array that may be written to, held for as long as this lives.
template <typename Item>
class Column {
 public:
  Column(const char* name, nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_CONTIG) != 0) {
      PyErr_Clear();
      fail(PyExc_TypeError, "%s must be an array that can be written to, C-contiguous", name);
    }
    if (view_.ndim == 1 && view_.itemsize == sizeof(Item)) return;
    PyBuffer_Release(&view_);
    fail(PyExc_ValueError, "%s must have one dimension, and items of %zu bytes", name, sizeof(Item));
  }
  ~Column() { PyBuffer_Release(&view_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  std::span<Item> items() const {
    return {static_cast<Item*>(view_.buf), static_cast<std::size_t>(view_.shape[0])};
  }

 private:
  Py_buffer view_{};
};

class SlotLeases {
 public:
  // index: outlives this. arrays: kvtier.index.slot_leases.SlotArrays.
  SlotLeases(keys::KeyIndex& index, std::size_t column, const nb::tuple& arrays,
             nb::handle num_leases, nb::handle is_reserved, std::uint64_t bit, std::uint64_t keeps)
      : blocks_("blocks", checked_size(arrays)[0]),
        sources_("sources", arrays[1]),
        generations_("generations", arrays[2]),
        users_("users", arrays[3]),
        last_use_("last_use", arrays[4]),
        num_leases_("num_leases", num_leases),
        is_reserved_("is_reserved", is_reserved),
        leases_(index, column,
                {blocks_.items(), sources_.items(), generations_.items(), users_.items(),
                 last_use_.items(), size_of(arrays[5]), size_of(arrays[6])},
                num_leases_.items(), is_reserved_.items(), bit, keeps) {
    const std::size_t num = blocks_.items().size();
    if (sources_.items().size() != num || generations_.items().size() != num ||
        users_.items().size() != num || num_leases_.items().size() != num ||
        is_reserved_.items().size() != num)
      fail(PyExc_ValueError, "the arrays must have equal lengths");
  }

  // (slots, generations), as int64 bytes.
  nb::object lease(nb::handle blocks, double now) {
    to_time(now);
    Given(blocks, "blocks must be iterable").blocks(blocks_given_);
    checked([&] { leases_.lease(blocks_given_, now, slots_); });
    nb::object slots = bytes_of(8 * slots_.size()), generations = bytes_of(8 * slots_.size());
    write_slots(data_of(slots), data_of(generations));
    return nb::make_tuple(slots, generations);
  }

  // The blocks, for each lease that has ended.
  nb::object release(nb::handle slots) {
    if (!read_array(slots, named_)) fail(PyExc_TypeError, "slots must be an array of int64");
    checked([&] { leases_.release(named_, ended_); });
    return numbers_of(ended_);
  }

  // The generations, as int64 bytes.
  nb::object reserve(nb::handle slots) {
    Given(slots, "slots must be iterable").slots(slots_);
    checked([&] { leases_.reserve(slots_); });
    nb::object generations = bytes_of(8 * slots_.size());
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const std::int64_t generation = leases_.generation(slots_[i]);
      std::memcpy(data_of(generations) + 8 * i, &generation, 8);
    }
    return generations;
  }

  // (positions of slots that it was to fill, each once; the blocks in them).
  nb::object end_reserved(nb::handle slots) {
    if (!read_array(slots, named_)) fail(PyExc_TypeError, "slots must be an array of int64");
    leases_.end_reserved(named_, which_, ended_);
    return nb::make_tuple(numbers_of(which_), numbers_of(ended_));
  }

  // Serves a message, if it is a look-up or a release: (the frame of the answer, the places of blocks
  // that count as looked up, the blocks of leases that have ended). None for any other message, and,
  // unless this is the only column, for a look-up of blocks that are not all there; nothing has
  // changed then.
  nb::object serve(nb::handle content, std::uint64_t room, std::size_t key_bytes, bool is_alone,
                   double now) {
    to_time(now);
    const Buffer buffer(content);
    if (!buffer.held()) fail(PyExc_TypeError, "content must be bytes");
    const node::Bytes message{static_cast<const std::byte*>(buffer.view().buf),
                              static_cast<std::size_t>(buffer.view().len)};
    if (const auto lookup = node::read_lookup(message))
      return lookup->room == room ? look_up(*lookup, key_bytes, is_alone, now) : nb::none();
    const auto notice = node::read_release(message);
    if (!notice || notice->room != room || notice->slots.size() % 8 != 0) return nb::none();
    named_.resize(notice->slots.size() / 8);
    if (!named_.empty()) std::memcpy(named_.data(), notice->slots.data(), notice->slots.size());
    checked([&] { leases_.release(named_, ended_); });
    return nb::make_tuple(nb::bytes("", 0), nb::bytes("", 0), numbers_of(ended_));
  }

 private:
  static constexpr std::size_t kMaxKeys = std::size_t{1} << 16;  // MAX_KEYS

  static const nb::tuple& checked_size(const nb::tuple& arrays) {
    if (arrays.size() != 7) fail(PyExc_ValueError, "7 arrays and sizes, not %zu", arrays.size());
    return arrays;
  }
  static std::uint64_t size_of(nb::handle value) {
    const std::uint64_t size = to_number(value.ptr(), "a size");
    if (size == 0 || size > std::uint64_t{1} << 60) fail(PyExc_ValueError, "sizes must be positive");
    return size;
  }
  static nb::object bytes_of(std::size_t num) {
    return owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num)));
  }
  static std::byte* data_of(const nb::object& bytes) {
    return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
  }

  nb::object look_up(const node::LookupRequest& asked, std::size_t key_bytes, bool is_alone,
                     double now) {
    const std::size_t num = key_bytes == 0 ? 0 : asked.keys.size() / key_bytes;
    if (num == 0 || num > kMaxKeys || asked.keys.size() != num * key_bytes) return nb::none();
    keys_.resize(num);
    for (std::size_t i = 0; i < num; ++i) keys_[i] = {asked.keys.data() + i * key_bytes, key_bytes};
    checked([&] { leases_.lease_ready(keys_, now, !is_alone, states_, slots_); });
    if (!is_alone && slots_.size() < num) return nb::none();
    const node::LookupAnswer answer(asked.id, num, slots_.size());
    nb::object frame = bytes_of(answer.num_bytes());
    const auto [places, slots, generations] = answer.write(data_of(frame));
    for (std::size_t i = 0; i < num; ++i) places[i] = place_of(states_[i]);
    write_slots(slots, generations);
    return nb::make_tuple(frame, nb::bytes(places, asked.counts ? num : 0), Numbers(0).given());
  }

  // Codes of kvtier.cache.local.PLACES, where nothing is in storage.
  static std::byte place_of(trie::State state) {
    switch (state) {
      case trie::State::ready: return std::byte{2};
      case trie::State::writing:
      case trie::State::evicting: return std::byte{1};
      default: return std::byte{0};
    }
  }

  void write_slots(std::byte* slots, std::byte* generations) const {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const std::int64_t slot = slots_[i], generation = leases_.generation(slots_[i]);
      std::memcpy(slots + 8 * i, &slot, 8);
      std::memcpy(generations + 8 * i, &generation, 8);
    }
  }

  Column<std::int64_t> blocks_;
  Column<std::int8_t> sources_;
  Column<std::int64_t> generations_;
  Column<std::uint64_t> users_;
  Column<double> last_use_;
  Column<std::uint32_t> num_leases_;
  Column<std::uint8_t> is_reserved_;
  keys::SlotLeases leases_;
  // Kept from call to call, to spare allocations.
  std::vector<keys::BlockId> blocks_given_, ended_;
  std::vector<std::uint64_t> named_, which_;
  std::vector<trie::Label> keys_;
  std::vector<trie::State> states_;
  std::vector<trie::Slot> slots_;
};

}  // namespace kvtier::bound
