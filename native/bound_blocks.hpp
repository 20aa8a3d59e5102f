// Blocks of an index by number, as Python calls them: alike for the trie and for the flat table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_columns.hpp"
#include "bound_values.hpp"
#include "packed.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

using trie::BlockId;
using trie::Slot;
using trie::State;

// Base of the bound indexes. Arguments are checked here and trusted inside.
template <typename Index>
class Blocks {
 public:
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  std::size_t size() { return index_.size(); }
  std::size_t num_bytes() { return index_.num_bytes(); }

  nb::object states_of(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    return list_of(read_blocks(blocks),
                   [&](BlockId block) { return state_object(index_.state(block, at)); });
  }
  nb::object slots(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    return checked([&] {
      return numbers_of(blocks_, [&](BlockId block) { return index_.slot(block, at); });
    });
  }
  std::uint32_t num_uses(nb::handle block) {
    return of(block, [&](BlockId id) { return index_.num_uses(id); });
  }
  nb::object num_uses_of(nb::handle blocks) {
    read_blocks(blocks);
    return checked([&] {
      return numbers_of(blocks_, [&](BlockId block) { return index_.num_uses(block); });
    });
  }
  std::uint32_t num_leases(nb::handle block, nb::handle column) {
    const std::size_t at = columns_.position(column);
    return of(block, [&](BlockId id) { return index_.num_leases(id, at); });
  }
  std::size_t num_evictable(nb::handle column) {
    return index_.num_evictable(columns_.position(column));
  }
  std::size_t num_held(nb::handle column) { return index_.num_held(columns_.position(column)); }

  void set_room(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t num = to_limit(num_blocks);
    checked([&] { index_.set_room(at, num); });
  }
  void set_doubling(double at_blocks) { index_.set_doubling(to_doubling(at_blocks)); }

  void begin_write(nb::handle blocks, nb::handle column, nb::handle slots) {
    const std::size_t at = columns_.position(column);
    pairs(blocks, slots, [&](BlockId block, Slot slot) { index_.begin_write(block, at, slot); });
  }
  nb::object abort(nb::handle blocks, nb::handle column) {
    slots_.clear();
    each(blocks, column,
         [&](BlockId block, std::size_t at) { slots_.push_back(index_.abort(block, at)); });
    return numbers_of(slots_);
  }
  void lease(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { index_.lease(block, at); });
  }
  void release(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { index_.release(block, at); });
  }

  nb::object evict(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t most = to_limit(num_blocks);
    blocks_.clear();
    checked([&] { index_.evict(at, most, blocks_); });
    return numbers_of(blocks_);
  }
  nb::object forget(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    slots_.clear();
    checked([&] { index_.forget(blocks_, at, slots_); });
    return numbers_of(slots_);
  }
  void keep(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { index_.keep(block, at); });
  }
  nb::object lose(nb::handle block, nb::handle column) {
    const std::size_t at = columns_.position(column);
    const std::optional<Slot> slot = of(block, [&](BlockId id) { return index_.lose(id, at); });
    return slot ? number(*slot) : nb::none();
  }

  void check_invariants() {
    checked([&] { index_.check_invariants(); });
  }

 protected:
  // make: makes the index, in its place.
  template <typename Make>
  Blocks(nb::tuple tiers, nb::tuple states, Make&& make)
      : index_(make()), columns_(std::move(tiers)), states_(std::move(states)) {
    if (states_.size() != 4) fail(PyExc_ValueError, "four states, not %zu", states_.size());
  }

  nb::object state_object(State state) const {
    return nb::borrow(states_[static_cast<std::size_t>(state) - 1]);
  }
  const std::vector<BlockId>& read_blocks(nb::handle blocks) {
    Given(blocks, "blocks must be iterable").blocks(blocks_);
    return blocks_;
  }
  template <typename Call>
  std::invoke_result_t<Call, BlockId> of(nb::handle block, Call&& call) {
    const BlockId id = to_number(block.ptr(), "a block");
    return checked([&] { return call(id); });
  }
  template <typename Change>
  void each(nb::handle blocks, nb::handle column, Change&& change) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    checked([&] {
      for (const BlockId block : blocks_) change(block, at);
    });
  }
  template <typename Change>
  void pairs(nb::handle blocks, nb::handle values, Change&& change) {
    const Given given(values, "slots must be iterable");
    read_blocks(blocks);
    given.slots(slots_);
    if (blocks_.size() != slots_.size())
      fail(PyExc_ValueError, "one number for each block: %zu blocks, %zu numbers", blocks_.size(),
           slots_.size());
    checked([&] {
      for (std::size_t i = 0; i < blocks_.size(); ++i) change(blocks_[i], slots_[i]);
    });
  }

  Index index_;
  Columns columns_;
  nb::tuple states_;
  // Kept from call to call, to spare allocations.
  std::vector<BlockId> blocks_;
  std::vector<Slot> slots_;
};

// Binds what an index has in common with the other one.
template <typename Bound>
void bind_blocks(nb::class_<Bound>& type) {
  type.def("__len__", &Bound::size, nb::lock_self())
      .def("num_bytes", &Bound::num_bytes, nb::lock_self())
      .def("states_of", &Bound::states_of, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("slots", &Bound::slots, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("num_uses", &Bound::num_uses, nb::arg("block"), nb::lock_self())
      .def("num_uses_of", &Bound::num_uses_of, nb::arg("blocks"), nb::lock_self())
      .def("num_leases", &Bound::num_leases, nb::arg("block"), nb::arg("tier"), nb::lock_self())
      .def("num_evictable", &Bound::num_evictable, nb::arg("tier"), nb::lock_self())
      .def("num_held", &Bound::num_held, nb::arg("tier"), nb::lock_self())
      .def("set_room", &Bound::set_room, nb::arg("tier"), nb::arg("num_blocks"), nb::lock_self())
      .def("set_doubling", &Bound::set_doubling, nb::arg("at_blocks"), nb::lock_self())
      .def("begin_write", &Bound::begin_write, nb::arg("blocks"), nb::arg("tier"),
           nb::arg("slots"), nb::lock_self())
      .def("abort", &Bound::abort, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("lease", &Bound::lease, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("release", &Bound::release, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("evict", &Bound::evict, nb::arg("tier"), nb::arg("num_blocks"), nb::lock_self())
      .def("forget", &Bound::forget, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("keep", &Bound::keep, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("lose", &Bound::lose, nb::arg("block"), nb::arg("tier"), nb::lock_self())
      .def("check_invariants", &Bound::check_invariants, nb::lock_self());
}

}  // namespace kvtier::bound
