// The block trie as a class of Python, for bind_trie.cpp. Arguments are checked here and trusted
// inside.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_columns.hpp"
#include "bound_keys.hpp"
#include "bound_labels.hpp"
#include "bound_values.hpp"
#include "packed.hpp"
#include "trie/block_trie.hpp"

namespace kvtier::bound {

using trie::BlockId;
using trie::Slot;
using trie::State;

// Of that file only: then calls are compiled into their bindings, and a miss takes 8 % less.
namespace {

class BlockTrie {
 public:
  BlockTrie(nb::tuple tiers, nb::tuple policies, nb::tuple states,
            nb::handle labels_type, nb::handle match_type)
      : trie_(checked([&] {
          if (tiers.size() < 1 || tiers.size() > trie::kMaxColumns ||
              tiers.size() != policies.size())
            fail(PyExc_ValueError, "1 to %zu tiers with a policy each, not %zu tiers and %zu policies",
                 trie::kMaxColumns, tiers.size(), policies.size());
          return trie::BlockTrie(names_of(policies));
        })),
        columns_(std::move(tiers)),
        states_(std::move(states)),
        labels_(labels_type),
        match_type_(nb::borrow(match_type)) {
    for (const char* each : {"blocks", "tiers", "in_flight", "num_asked"})
      match_fields_.push_back(owned(PyUnicode_InternFromString(each)));
    if (states_.size() != 4) fail(PyExc_ValueError, "four states, not %zu", states_.size());
    // `match` makes its result as object.__new__ does.
    if (!PyType_Check(match_type_.ptr()) ||
        reinterpret_cast<PyTypeObject*>(match_type_.ptr())->tp_new != PyBaseObject_Type.tp_new)
      fail(PyExc_TypeError, "match_type must be a class that is made of plain objects, not %R",
           match_type_.ptr());
  }
  BlockTrie(const BlockTrie&) = delete;
  BlockTrie& operator=(const BlockTrie&) = delete;

  nb::object match(nb::handle space, nb::handle labels) {
    std::size_t num_asked = 0;
    labels_.read(labels, [&](trie::Labels& path) {
      found_.clear();
      num_asked = path.size();
      trie_.match(to_name(space.ptr(), "a namespace"), path, found_);
    });
    const nb::object fields[] = {
        numbers_of(found_, [](const auto& each) { return each.block; }),
        tuple_of(found_, [&](const auto& each) { return nb::borrow(columns_.tiers()[each.tier]); }),
        tuple_of(found_,
                 [](const auto& each) { return nb::borrow(each.in_flight ? Py_True : Py_False); }),
        owned(PyLong_FromSize_t(num_asked)),
    };
    // As object.__setattr__ does it, which is how a frozen dataclass fills itself.
    auto* const type = reinterpret_cast<PyTypeObject*>(match_type_.ptr());
    nb::object result = owned(type->tp_alloc(type, 0));
    for (std::size_t i = 0; i < std::size(fields); ++i)
      if (PyObject_GenericSetAttr(result.ptr(), match_fields_[i].ptr(), fields[i].ptr()) != 0)
        throw nb::python_error();
    return result;
  }

  nb::object match_slots(nb::handle space, nb::handle labels, nb::handle column) {
    const std::size_t at = columns_.position(column);
    PyObject* found = nullptr;
    labels_.read(labels, [&](trie::Labels& path) {
      constexpr std::size_t kItem = sizeof(std::int64_t);
      nb::object made = owned(
          PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(path.size() * kItem)));
      auto* const slots = reinterpret_cast<std::int64_t*>(PyBytes_AS_STRING(made.ptr()));
      const std::size_t num =
          trie_.match_slots(to_name(space.ptr(), "a namespace"), path, at, slots);
      found = made.release().ptr();
      if (num < path.size()) _PyBytes_Resize(&found, static_cast<Py_ssize_t>(num * kItem));
    });
    return owned(found);
  }

  nb::object state(nb::handle block, nb::handle column) {
    return state_object(trie_.state(to_number(block.ptr(), "a block"), columns_.position(column)));
  }

  nb::object states(nb::handle space, nb::handle labels, nb::handle column, nb::handle after) {
    std::vector<State> found;
    const std::size_t at = columns_.position(column);
    labels_.read(labels, [&](trie::Labels& path) {
      trie_.states(to_name(space.ptr(), "a namespace"), path, at, optional_block(after), found);
    });
    return list_of(found, [&](State each) { return state_object(each); });
  }

  nb::object states_of(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    return list_of(read_blocks(blocks),
                   [&](BlockId block) { return state_object(trie_.state(block, at)); });
  }

  nb::object slots(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    return checked([&] {
      return numbers_of(blocks_, [&](BlockId block) { return trie_.slot(block, at); });
    });
  }

  nb::object prefixes(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    return checked([&] { return numbers_of(trie_.prefixes(blocks_, at)); });
  }

  std::uint32_t num_uses(nb::handle block) {
    const BlockId id = to_number(block.ptr(), "a block");
    return checked([&] { return trie_.num_uses(id); });
  }
  nb::object num_uses_of(nb::handle blocks) {
    read_blocks(blocks);
    return checked([&] {
      return numbers_of(blocks_, [&](BlockId block) { return trie_.num_uses(block); });
    });
  }
  std::size_t num_evictable(nb::handle column) {
    return trie_.num_evictable(columns_.position(column));
  }
  std::size_t num_held(nb::handle column) { return trie_.num_held(columns_.position(column)); }
  std::size_t num_namespaces() { return trie_.num_namespaces(); }
  std::size_t num_bytes() { return trie_.num_bytes(); }
  std::size_t size() { return trie_.size(); }

  nb::object extend(nb::handle space, nb::handle labels, nb::handle after) {
    labels_.read(labels, [&](trie::Labels& path) {
      blocks_.clear();
      trie_.extend(to_name(space.ptr(), "a namespace"), path, optional_block(after), blocks_);
    });
    return numbers_of(blocks_);
  }

  nb::object insert(nb::handle space, nb::handle labels, nb::handle column, nb::handle slots,
                    double now, nb::handle after, bool hold) {
    const std::size_t at = columns_.position(column);
    to_time(now);
    const Given given(slots, "slots must be iterable");
    std::size_t num_new = 0;
    labels_.read(labels, [&](trie::Labels& path) {
      given.slots(slots_);
      blocks_.clear();
      if (path.size() != slots_.size())
        fail(PyExc_ValueError, "a slot for each block: %zu labels, %zu slots", path.size(),
             slots_.size());
      num_new = trie_.insert(to_name(space.ptr(), "a namespace"), path, optional_block(after), at,
                             slots_, now, hold, blocks_);
    });
    slots_.resize(blocks_.size());  // the path may end before the labels do
    return nb::make_tuple(numbers_of(blocks_), numbers_of(slots_), num_new);
  }

  void begin_write(nb::handle blocks, nb::handle column, nb::handle slots) {
    const std::size_t at = columns_.position(column);
    const Given given(slots, "slots must be iterable");
    read_blocks(blocks);
    given.slots(slots_);
    if (blocks_.size() != slots_.size())
      fail(PyExc_ValueError, "a slot for each block: %zu blocks, %zu slots", blocks_.size(),
           slots_.size());
    checked([&] {
      for (std::size_t i = 0; i < blocks_.size(); ++i) trie_.begin_write(blocks_[i], at, slots_[i]);
    });
  }

  void asked(nb::handle space, nb::handle labels, double now) {
    to_time(now);
    labels_.read(labels, [&](trie::Labels& path) {
      trie_.asked(to_name(space.ptr(), "a namespace"), path, now);
    });
  }
  void retain(nb::handle space, nb::handle labels, nb::handle said, double now) {
    to_time(now);
    const policy::Said it = to_said(said);
    labels_.read(labels, [&](trie::Labels& path) {
      trie_.retain(to_name(space.ptr(), "a namespace"), path, it, now);
    });
  }
  nb::object admit(nb::handle blocks, nb::handle column, nb::handle num_free,
                   double least_chance) {
    const std::size_t at = columns_.position(column);
    const std::size_t free = to_limit(num_free);
    read_blocks(blocks);
    std::vector<BlockId> admitted;
    checked([&] { trie_.admit(blocks_, at, free, least_chance, admitted); });
    return numbers_of(admitted);
  }
  void set_room(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t num = to_limit(num_blocks);
    checked([&] { trie_.set_room(at, num); });
  }
  void set_doubling(double at_blocks) { trie_.set_doubling(to_doubling(at_blocks)); }

  void commit(nb::handle blocks, nb::handle column, double now) {
    to_time(now);
    each(blocks, column, [&](BlockId block, std::size_t at) { trie_.commit(block, at, now); });
  }
  void lease(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { trie_.lease(block, at); });
  }
  void release(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { trie_.release(block, at); });
  }
  void keep(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { trie_.keep(block, at); });
  }
  nb::object lose(nb::handle block, nb::handle column) {
    const BlockId id = to_number(block.ptr(), "a block");
    const std::size_t at = columns_.position(column);
    const std::optional<Slot> slot = checked([&] { return trie_.lose(id, at); });
    return slot ? number(*slot) : nb::none();
  }
  std::uint32_t num_leases(nb::handle block, nb::handle column) {
    const BlockId id = to_number(block.ptr(), "a block");
    const std::size_t at = columns_.position(column);
    return checked([&] { return trie_.num_leases(id, at); });
  }
  nb::object origin(nb::handle block) {
    const BlockId id = to_number(block.ptr(), "a block");
    const trie::BlockTrie::Origin from = checked([&] { return trie_.origin(id); });
    return nb::make_tuple(bytes(from.space), from.depth);
  }
  nb::object names(nb::handle blocks) { return names_of(trie_, read_blocks(blocks)); }
  nb::object abort(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    slots_.clear();
    checked([&] {
      for (const BlockId block : blocks_) slots_.push_back(trie_.abort(block, at));
    });
    return numbers_of(slots_);
  }
  nb::object forget(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    slots_.clear();
    checked([&] { trie_.forget(blocks_, at, slots_); });
    return numbers_of(slots_);
  }
  void touch(nb::handle blocks, double now) {
    to_time(now);
    read_blocks(blocks);
    checked([&] { trie_.touch(blocks_, now); });
  }

  nb::object evict(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t most = to_limit(num_blocks);
    blocks_.clear();
    checked([&] { trie_.evict(at, most, blocks_); });
    return numbers_of(blocks_);
  }

  // Evicts and forgets; the slots that are free now.
  nb::object drop(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t most = to_limit(num_blocks);
    blocks_.clear();
    slots_.clear();
    checked([&] {
      trie_.evict(at, most, blocks_);
      trie_.forget(blocks_, at, slots_);
    });
    return numbers_of(slots_);
  }

  nb::object missing_keys(nb::handle block) {
    return missing_keys_of(trie_, to_number(block.ptr(), "a block"));
  }
  void set_keys(nb::handle blocks, nb::handle keys) {
    const Keys given = packed_from<trie::Key>(keys);
    bound::set_keys(trie_, read_blocks(blocks), given);
  }

  // (block, parent, label, num_uses, [(state, slot, leases, num_children) per column]) of every
  // node, parents first; the parent of a root is None.
  nb::object dump() {
    const trie::Nodes& nodes = trie_.nodes();
    std::vector<trie::Index> order;
    trie_.each([&](trie::Index index) { order.push_back(index); });
    std::stable_sort(order.begin(), order.end(),
                     [&](trie::Index a, trie::Index b) { return nodes[a].depth < nodes[b].depth; });
    return list_of(order, [&](trie::Index index) -> nb::object {
      const trie::Node& node = nodes[index];
      nb::list places;
      for (std::size_t column = 0; column < nodes.num_columns(); ++column) {
        const trie::Residency& at = nodes.residency(index, column);
        const trie::Standing& standing = nodes.standing(index, column);
        const bool absent = at.state == State::absent;
        places.append(nb::make_tuple(state_object(at.state),
                                     absent ? -1 : static_cast<long long>(at.slot),
                                     standing.leases, standing.num_children));
      }
      nb::object parent = nodes.is_block(index) ? number(nodes.id(node.parent)) : nb::none();
      return nb::make_tuple(number(nodes.id(index)), parent, bytes(trie_.label(index)),
                            nodes.num_uses(index), places);
    });
  }

  void check_invariants() {
    checked([&] { trie_.check_invariants(); });
  }

 private:
  nb::object state_object(State state) const {
    return nb::borrow(states_[static_cast<std::size_t>(state) - 1]);
  }

  static std::optional<BlockId> optional_block(nb::handle block) {
    if (block.is_none()) return std::nullopt;
    return to_number(block.ptr(), "a block");
  }

  const std::vector<BlockId>& read_blocks(nb::handle blocks) {
    Given(blocks, "blocks must be iterable").blocks(blocks_);
    return blocks_;
  }

  template <typename Change>
  void each(nb::handle blocks, nb::handle column, Change&& change) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    checked([&] {
      for (const BlockId block : blocks_) change(block, at);
    });
  }

  trie::BlockTrie trie_;
  Columns columns_;
  nb::tuple states_;
  LabelReader labels_;
  nb::object match_type_;
  std::vector<nb::object> match_fields_;
  // Kept from call to call, to spare allocations.
  std::vector<BlockId> blocks_;
  std::vector<Slot> slots_;
  std::vector<trie::BlockTrie::Found> found_;
};

}  // namespace

}  // namespace kvtier::bound
