// The block trie as a class of Python, for bind_trie.cpp. Arguments are checked here and trusted
// inside.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "bound_blocks.hpp"
#include "bound_columns.hpp"
#include "bound_keys.hpp"
#include "bound_labels.hpp"
#include "bound_values.hpp"
#include "packed.hpp"
#include "trie/block_trie.hpp"

namespace kvtier::bound {

// Of that file only: then calls are compiled into their bindings, and a miss takes 8 % less.
namespace {

class BlockTrie : public Blocks<trie::BlockTrie> {
 public:
  BlockTrie(nb::tuple tiers, nb::tuple policies, nb::tuple states, nb::handle labels_type,
            nb::handle match_type)
      : Blocks(tiers, states, [&] { return trie::BlockTrie(checked_policies(tiers, policies)); }),
        labels_(labels_type),
        match_type_(nb::borrow(match_type)) {
    for (const char* each : {"blocks", "tiers", "in_flight", "num_asked"})
      match_fields_.push_back(owned(PyUnicode_InternFromString(each)));
    // `match` makes its result as object.__new__ does.
    if (!PyType_Check(match_type_.ptr()) ||
        reinterpret_cast<PyTypeObject*>(match_type_.ptr())->tp_new != PyBaseObject_Type.tp_new)
      fail(PyExc_TypeError, "match_type must be a class that is made of plain objects, not %R",
           match_type_.ptr());
  }

  nb::object match(nb::handle space, nb::handle labels) {
    std::size_t num_asked = 0;
    labels_.read(labels, [&](trie::Labels& path) {
      found_.clear();
      num_asked = path.size();
      index_.match(to_name(space.ptr(), "a namespace"), path, found_);
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
      nb::object made =
          owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(path.size() * kItem)));
      auto* const slots = reinterpret_cast<std::int64_t*>(PyBytes_AS_STRING(made.ptr()));
      const std::size_t num =
          index_.match_slots(to_name(space.ptr(), "a namespace"), path, at, slots);
      found = made.release().ptr();
      if (num < path.size()) _PyBytes_Resize(&found, static_cast<Py_ssize_t>(num * kItem));
    });
    return owned(found);
  }

  nb::object state(nb::handle block, nb::handle column) {
    return state_object(index_.state(to_number(block.ptr(), "a block"), columns_.position(column)));
  }

  nb::object states(nb::handle space, nb::handle labels, nb::handle column, nb::handle after) {
    std::vector<State> found;
    const std::size_t at = columns_.position(column);
    labels_.read(labels, [&](trie::Labels& path) {
      index_.states(to_name(space.ptr(), "a namespace"), path, at, optional_block(after), found);
    });
    return list_of(found, [&](State each) { return state_object(each); });
  }

  nb::object prefixes(nb::handle blocks, nb::handle column) {
    const std::size_t at = columns_.position(column);
    read_blocks(blocks);
    return checked([&] { return numbers_of(index_.prefixes(blocks_, at)); });
  }

  std::size_t num_namespaces() { return index_.num_namespaces(); }

  nb::object extend(nb::handle space, nb::handle labels, nb::handle after) {
    labels_.read(labels, [&](trie::Labels& path) {
      blocks_.clear();
      index_.extend(to_name(space.ptr(), "a namespace"), path, optional_block(after), blocks_);
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
      num_new = index_.insert(to_name(space.ptr(), "a namespace"), path, optional_block(after), at,
                              slots_, now, hold, blocks_);
    });
    slots_.resize(blocks_.size());  // the path may end before the labels do
    return nb::make_tuple(numbers_of(blocks_), numbers_of(slots_), num_new);
  }

  void asked(nb::handle space, nb::handle labels, double now) {
    to_time(now);
    labels_.read(labels, [&](trie::Labels& path) {
      index_.asked(to_name(space.ptr(), "a namespace"), path, now);
    });
  }
  void used_state(nb::handle space, nb::handle labels, std::uint32_t num_before, nb::handle front,
                  bool at_end, double now) {
    to_time(now);
    const BlockId block = to_number(front.ptr(), "a block");
    labels_.read(labels, [&](trie::Labels& path) {
      index_.used_state(to_name(space.ptr(), "a namespace"), path, num_before, block, at_end, now);
    });
  }
  void retain(nb::handle space, nb::handle labels, nb::handle said, double now) {
    to_time(now);
    const policy::BlockHint it = to_said(said);
    labels_.read(labels, [&](trie::Labels& path) {
      index_.retain(to_name(space.ptr(), "a namespace"), path, it, now);
    });
  }
  nb::object admit(nb::handle blocks, nb::handle column, nb::handle num_free, double least_chance) {
    const std::size_t at = columns_.position(column);
    const std::size_t free = to_limit(num_free);
    read_blocks(blocks);
    std::vector<BlockId> admitted;
    checked([&] { index_.admit(blocks_, at, free, least_chance, admitted); });
    return numbers_of(admitted);
  }

  void commit(nb::handle blocks, nb::handle column, double now) {
    to_time(now);
    each(blocks, column, [&](BlockId block, std::size_t at) { index_.commit(block, at, now); });
  }
  nb::object origin(nb::handle block) {
    const BlockId id = to_number(block.ptr(), "a block");
    const trie::BlockTrie::Origin from = checked([&] { return index_.origin(id); });
    return nb::make_tuple(bytes(from.space), from.depth);
  }
  nb::object names(nb::handle blocks) { return names_of(index_, read_blocks(blocks)); }
  void touch(nb::handle blocks, double now) {
    to_time(now);
    read_blocks(blocks);
    checked([&] { index_.touch(blocks_, now); });
  }

  // Evicts and forgets; the slots that are free now.
  nb::object drop(nb::handle column, nb::handle num_blocks) {
    const std::size_t at = columns_.position(column);
    const std::size_t most = to_limit(num_blocks);
    blocks_.clear();
    slots_.clear();
    checked([&] {
      index_.evict(at, most, blocks_);
      index_.forget(blocks_, at, slots_);
    });
    return numbers_of(slots_);
  }

  nb::object missing_keys(nb::handle block) {
    return missing_keys_of(index_, to_number(block.ptr(), "a block"));
  }
  void set_keys(nb::handle blocks, nb::handle keys) {
    const Keys given = packed_from<trie::Key>(keys);
    bound::set_keys(index_, read_blocks(blocks), given);
  }

  // (block, parent, label, num_uses, [(state, slot, leases, num_children) per column]) of every
  // node, parents first; the parent of a root is None.
  nb::object dump() {
    const trie::Nodes& nodes = index_.nodes();
    std::vector<trie::Index> order;
    index_.each([&](trie::Index index) { order.push_back(index); });
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
                                     absent ? -1 : static_cast<long long>(at.slot), standing.leases,
                                     standing.num_children));
      }
      nb::object parent = nodes.is_block(index) ? number(nodes.id(node.parent)) : nb::none();
      return nb::make_tuple(number(nodes.id(index)), parent, bytes(index_.label(index)),
                            nodes.num_uses(index), places);
    });
  }

 private:
  static std::optional<BlockId> optional_block(nb::handle block) {
    if (block.is_none()) return std::nullopt;
    return to_number(block.ptr(), "a block");
  }

  LabelReader labels_;
  nb::object match_type_;
  std::vector<nb::object> match_fields_;
  std::vector<trie::BlockTrie::Found> found_;  // kept from call to call, to spare allocations
};

}  // namespace

}  // namespace kvtier::bound
