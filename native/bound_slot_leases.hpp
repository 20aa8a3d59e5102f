// The slots that one engine of a node leases: see kvtier.index.slot_leases.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_free_slots.hpp"
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
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_CONTIG | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      fail(PyExc_TypeError, "%s must be an array that can be written to, C-contiguous", name);
    }
    const bool has_objects = view_.format != nullptr && std::strchr(view_.format, 'O') != nullptr;
    if (view_.ndim == 1 && view_.itemsize == sizeof(Item) && !has_objects) return;
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
        are_reserved_("are_reserved", arrays[5]),
        num_leases_("num_leases", num_leases),
        is_reserved_("is_reserved", is_reserved),
        index_(index),
        column_(column),
        leases_(index, column,
                {blocks_.items(), sources_.items(), generations_.items(), users_.items(),
                 are_reserved_.items(), last_use_.items(), size_of(arrays[6]), size_of(arrays[7])},
                num_leases_.items(), is_reserved_.items(), bit, keeps) {
    const std::size_t num = blocks_.items().size();
    if (sources_.items().size() != num || generations_.items().size() != num ||
        users_.items().size() != num || num_leases_.items().size() != num ||
        is_reserved_.items().size() != num || are_reserved_.items().size() != num)
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
    const node::Bytes message = message_in(buffer);
    if (const auto lookup = node::read_lookup(message))
      return lookup->room == room ? look_up(*lookup, key_bytes, is_alone, now) : nb::none();
    const auto notice = node::read_release(message);
    if (!notice || notice->room != room || notice->slots.size() % 8 != 0) return nb::none();
    named_.resize(notice->slots.size() / 8);
    if (!named_.empty()) std::memcpy(named_.data(), notice->slots.data(), notice->slots.size());
    checked([&] { leases_.release(named_, ended_); });
    return nb::make_tuple(nb::bytes("", 0), nb::bytes("", 0), numbers_of(ended_));
  }

  // Serves a reservation of slots in `segments`, each (its free slots, its first slot), in this
  // order: (the frame of the answer, the new blocks, their slots and generations as int64 bytes, the
  // hashes that are 0 under `mask`, the blocks with them). If there are too few slots, it calls
  // make_room(number of new blocks, blocks that must stay), which returns other segments, or None.
  // None, and nothing has changed, for any other message, without segments, or if no block is new.
  // With `has_overdue`, all blocks must be new.
  nb::object serve_reserve(nb::handle content, std::uint64_t room, std::size_t key_bytes,
                           const nb::tuple& segments, const nb::object& make_room,
                           std::uint64_t mask, bool has_overdue, double now) {
    to_time(now);
    const Buffer buffer(content);
    const auto asked = node::read_reserve(message_in(buffer));
    if (!asked || asked->room != room || key_bytes == 0 || !pending_.empty()) return nb::none();
    const std::size_t num = asked->keys.size() / key_bytes;
    if (num > kMaxAtOnce || asked->keys.size() != num * key_bytes) return nb::none();
    std::vector<Segment> places = segments_in(segments);
    read_keys(asked->keys, key_bytes, num);
    missing_.clear();
    ended_.clear();
    checked([&] { index_.missing(keys_, column_, missing_, ended_); });
    const std::size_t num_new = missing_.size();
    if (num_new == 0 || (has_overdue && num_new < num)) return nb::none();
    const node::Answer answer("ReserveAnswer", asked->id, {num, num, 8 * num_new, 8 * num_new},
                              false);
    nb::object frame = bytes_of(answer.num_bytes());
    const auto [are_new, are_known, slots, generations] = answer.write(data_of(frame));
    std::memset(are_new, 0, num);
    for (const std::uint32_t at : missing_) are_new[at] = std::byte{1};
    for (std::size_t i = 0; i < num_new; ++i) keys_[i] = keys_[missing_[i]];
    keys_.resize(num_new);
    const Pending pending(keys_, pending_);
    nb::object others;  // of which `places` has parts
    if (!take(places, num_new)) {
      others = make_room(num_new, numbers_of(ended_));
      if (others.is_none()) return others;
      if (!PyTuple_Check(others.ptr())) fail(PyExc_TypeError, "segments must be a tuple");
      places = segments_in(nb::borrow<nb::tuple>(others));
      if (!take(places, num_new)) return nb::none();
    }
    checked([&] { leases_.reserve_new(pending_, slots_, now, ended_, hashes_); });
    write_slots(slots, generations);
    marks_.clear();
    marked_.clear();
    for (std::size_t i = 0; i < num_new; ++i)
      if (const std::uint64_t hash = hashes_[i] & kMaxNumber; (hash & mask) == 0) {
        marks_.push_back(hash);
        marked_.push_back(ended_[i]);
      }
    std::memset(are_known, 0, num);
    if (num_new < num) {
      read_keys(asked->keys, key_bytes, num);
      index_.find(keys_, rows_);
      for (std::size_t i = 0; i < num; ++i)
        are_known[i] = std::byte{are_new[i] == std::byte{0} &&
                                 place_of(index_.state_at(rows_[i], column_)) != std::byte{0}};
    }
    return nb::make_tuple(frame, numbers_of(ended_), nb::bytes(slots, 8 * num_new),
                          nb::bytes(generations, 8 * num_new), numbers_of(marks_),
                          numbers_of(marked_));
  }

  // Whether the policy admits all new blocks of the reservation for which `make_room` was called.
  bool admits(nb::handle num_free) {
    const std::size_t num = to_limit(num_free);
    std::vector<std::uint32_t> which;
    checked([&] { index_.admit(pending_, column_, num, 0.0, which); });
    return !pending_.empty() && which.size() == pending_.size();
  }

  // Serves a commit of blocks: (the blocks; their slots, generations and depths, as int64 bytes;
  // their keys, concatenated; whether they go to storage). None, and nothing has changed, for any
  // other message, and unless all slots are reserved, each once.
  nb::object serve_commit(nb::handle content, std::uint64_t room) {
    const Buffer buffer(content);
    const auto notice = node::read_commit(message_in(buffer));
    if (!notice || notice->room != room || notice->slots.size() != notice->depths.size() ||
        notice->slots.size() % 8 != 0 || notice->slots.size() > 8 * kMaxAtOnce)
      return nb::none();
    for (const auto& [from, to] : {std::pair{notice->slots, &named_}, {notice->depths, &which_}}) {
      to->resize(from.size() / 8);
      if (!from.empty()) std::memcpy(to->data(), from.data(), from.size());
    }
    for (const std::uint64_t depth : which_)
      if (depth >> 32 != 0) return nb::none();
    if (!checked([&] { return leases_.commit(named_, which_, ended_); })) return nb::none();
    const std::size_t key_bytes = index_.rows().key_bytes();
    nb::object generations = bytes_of(8 * named_.size());
    nb::object keys = bytes_of(key_bytes * named_.size());
    for (std::size_t i = 0; i < named_.size(); ++i) {
      const std::int64_t generation = leases_.generation(static_cast<trie::Slot>(named_[i]));
      std::memcpy(data_of(generations) + 8 * i, &generation, 8);
      std::memcpy(data_of(keys) + key_bytes * i, index_.key(ended_[i]).data, key_bytes);
    }
    const auto given = [](node::Bytes field) { return nb::bytes(field.data(), field.size()); };
    return nb::make_tuple(numbers_of(ended_), given(notice->slots), generations,
                          given(notice->depths), keys, notice->to_storage);
  }

 private:
  static constexpr std::size_t kMaxKeys = std::size_t{1} << 16;    // MAX_KEYS
  static constexpr std::size_t kMaxAtOnce = std::size_t{1} << 11;  // MAX_AT_ONCE

  // While this lives, the keys of new blocks are in `pending`, and nothing else uses them.
  class Pending {
   public:
    Pending(std::vector<trie::Label>& keys, std::vector<trie::Label>& pending)
        : keys_(keys), pending_(pending) {
      pending_.swap(keys_);
    }
    ~Pending() {
      keys_.swap(pending_);
      pending_.clear();
    }
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

   private:
    std::vector<trie::Label>&keys_, &pending_;
  };

  // first: slot of the first one of `free`.
  struct Segment {
    slots::FreeSlots* free;
    trie::Slot first;
  };
  std::vector<Segment> segments_in(const nb::tuple& segments) const {
    std::vector<Segment> places;
    for (const nb::handle segment : segments) {
      FreeSlots* free = nullptr;
      const Items pair(segment, "a segment must be a pair");
      if (pair.size() != 2 || !nb::try_cast(nb::handle(pair[0]), free) || free == nullptr)
        fail(PyExc_TypeError, "a segment must be its free slots and its first slot");
      const trie::Slot first = to_slot(pair[1]);
      if (first > leases_.num_slots() || free->core().num_slots() > leases_.num_slots() - first)
        fail(PyExc_ValueError, "slots that the column can't have");
      places.push_back({&free->core(), first});
    }
    return places;
  }
  // Fills slots_. Returns false, and takes none, if there are fewer.
  bool take(const std::vector<Segment>& places, std::size_t num) {
    slots_.clear();
    std::vector<std::vector<slots::Slot>> taken;
    for (const auto [free, first] : places) {
      taken.push_back(free->take(std::min(num - slots_.size(), free->num_free())));
      for (const slots::Slot slot : taken.back()) slots_.push_back(slot + first);
    }
    if (slots_.size() == num) return true;
    for (std::size_t i = 0; i < taken.size(); ++i) places[i].free->free(taken[i]);
    return false;
  }

  static node::Bytes message_in(const Buffer& buffer) {
    if (!buffer.held()) fail(PyExc_TypeError, "content must be bytes");
    return {static_cast<const std::byte*>(buffer.view().buf),
            static_cast<std::size_t>(buffer.view().len)};
  }
  void read_keys(node::Bytes from, std::size_t key_bytes, std::size_t num) {
    keys_.resize(num);
    for (std::size_t i = 0; i < num; ++i) keys_[i] = {from.data() + i * key_bytes, key_bytes};
  }

  static const nb::tuple& checked_size(const nb::tuple& arrays) {
    if (arrays.size() != 8) fail(PyExc_ValueError, "8 arrays and sizes, not %zu", arrays.size());
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
    read_keys(asked.keys, key_bytes, num);
    checked([&] { leases_.lease_ready(keys_, now, !is_alone, states_, slots_); });
    if (!is_alone && slots_.size() < num) return nb::none();
    const node::Answer answer("LookupAnswer", asked.id,
                              {num, 8 * slots_.size(), 8 * slots_.size(), num}, true);
    nb::object frame = bytes_of(answer.num_bytes());
    const auto [places, slots, generations, sources] = answer.write(data_of(frame));
    std::memset(sources, 0, num);  // each would be read from memory
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
  Column<std::uint8_t> are_reserved_;
  Column<std::uint32_t> num_leases_;
  Column<std::uint8_t> is_reserved_;
  keys::KeyIndex& index_;
  std::size_t column_;
  keys::SlotLeases leases_;
  // Kept from call to call, to spare allocations.
  std::vector<keys::BlockId> blocks_given_, ended_;
  std::vector<std::uint64_t> named_, which_, hashes_, marks_, marked_;
  std::vector<std::uint32_t> missing_;
  std::vector<trie::Index> rows_;
  std::vector<trie::Label> keys_, pending_;  // pending_: see `admits`; empty at other times
  std::vector<trie::State> states_;
  std::vector<trie::Slot> slots_;
};

}  // namespace kvtier::bound
