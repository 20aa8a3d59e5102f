// Binding of the flat table of keys. Arguments are checked here and trusted inside.
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <vector>

#include "bind.hpp"
#include "bound_blocks.hpp"
#include "bound_columns.hpp"
#include "bound_slot_leases.hpp"
#include "bound_values.hpp"
#include "packed.hpp"
#include "keys/key_index.hpp"

namespace nb = nanobind;

namespace kvtier {

using bound::checked;
using bound::fail;
using bound::list_of;
using bound::number;
using bound::numbers_of;
using bound::owned;
using keys::BlockId;
using trie::Index;
using trie::kNone;
using trie::Slot;
using trie::State;

namespace {

// Stands for a block that is not known: kvtier.core.types.NO_BLOCK.
constexpr BlockId kNoBlock = bound::kMaxNumber;

// Keys as they are given: one after the other in an array of items without a type, or any iterable
// of bytes. All that may run Python, and call us again, is over when this is made.
class GivenKeys {
 public:
  explicit GivenKeys(nb::handle keys) {
    if (!PyList_Check(keys.ptr()) && !PyTuple_Check(keys.ptr())) array_.emplace(keys);
    if (array_ && is_array(*array_)) return;
    array_.reset();
    items_.emplace(keys, "keys must be iterable");
  }

  void read(std::vector<trie::Label>& keys) const {
    if (items_) {
      keys.resize(items_->size());
      for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = bound::to_label((*items_)[i]);
      return;
    }
    const Py_buffer& view = array_->view();
    const auto* key = static_cast<const std::byte*>(view.buf);
    const auto num_bytes = static_cast<std::size_t>(view.itemsize);
    keys.resize(static_cast<std::size_t>(view.shape[0]));
    for (trie::Label& each : keys) {
      each = {key, num_bytes};
      key += num_bytes;
    }
  }

 private:
  static bool is_array(const bound::Buffer& buffer) {
    if (!buffer.held() || buffer.view().ndim != 1 || buffer.view().format == nullptr) return false;
    const std::string_view format = buffer.view().format;
    return format.ends_with('x') && buffer.view().itemsize > 0 &&
           static_cast<std::size_t>(buffer.view().itemsize) <= trie::kMaxLabelBytes;
  }

  std::optional<bound::Buffer> array_;
  std::optional<bound::Items> items_;
};

class KeyIndex : public bound::Blocks<keys::KeyIndex> {
 public:
  KeyIndex(nb::tuple tiers, nb::tuple policies, nb::tuple states, std::size_t group_bytes)
      : Blocks(tiers, states, [&] {
          return keys::KeyIndex(bound::checked_policies(tiers, policies), group_bytes);
        }) {}

  // (blocks, bytes: the number of a state for each block and column, 0 for one unknown).
  nb::object find(nb::handle keys) {
    const GivenKeys given(keys);
    given.read(keys_);
    index_.find(keys_, rows_);
    const std::size_t num_columns = columns_.tiers().size();
    nb::object states =
        owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(rows_.size() * num_columns)));
    char* at = PyBytes_AS_STRING(states.ptr());
    for (const Index row : rows_)
      for (std::size_t column = 0; column < num_columns; ++column)
        *at++ = row == kNone ? 0 : static_cast<char>(index_.state_at(row, column));
    nb::object blocks =
        numbers_of(rows_, [&](Index row) { return row == kNone ? kNoBlock : index_.id(row); });
    return nb::make_tuple(blocks, states);
  }

  // (positions of the keys that are not in a column, each key once; the blocks ready there).
  nb::object missing(nb::handle keys, nb::handle column) {
    const std::size_t at = columns_.position(column);
    const GivenKeys given(keys);
    given.read(keys_);
    which_.clear();
    blocks_.clear();
    checked([&] { index_.missing(keys_, at, which_, blocks_); });
    return nb::make_tuple(numbers_of(which_), numbers_of(blocks_));
  }
  nb::object hashes(nb::handle blocks) {
    read_blocks(blocks);
    return checked([&] {
      return numbers_of(blocks_,
                        [&](BlockId block) { return index_.hash(block) & bound::kMaxNumber; });
    });
  }
  // The blocks in slots of a column. O(all blocks).
  nb::object in_slots(nb::handle slots, nb::handle column) {
    const std::size_t at = columns_.position(column);
    bound::Given(slots, "slots must be iterable").slots(slots_);
    const std::unordered_set<Slot> wanted(slots_.begin(), slots_.end());
    blocks_.clear();
    index_.each([&](Index row) {
      const keys::Standing& it = index_.rows().at(row, at);
      if (it.state != State::absent && wanted.contains(it.slot)) blocks_.push_back(index_.id(row));
    });
    return numbers_of(blocks_);
  }

  void expect(nb::handle num_blocks) {
    const std::size_t num = bound::to_limit(num_blocks);
    if (num > kNone) fail(PyExc_ValueError, "num_blocks: %zu is more than 2**32 - 1", num);
    checked([&] { index_.expect(num); });
  }
  nb::object make(nb::handle keys) {
    const GivenKeys given(keys);
    given.read(keys_);
    blocks_.clear();
    checked([&] { index_.make(keys_, blocks_); });
    return numbers_of(blocks_);
  }

  // (blocks, hashes): blocks of these keys, which are being written to slots, and count as used.
  nb::object write_new(nb::handle keys, nb::handle column, nb::handle slots) {
    const std::size_t at = columns_.position(column);
    const bound::Given given_slots(slots, "slots must be iterable");
    const GivenKeys given(keys);
    given.read(keys_);
    given_slots.slots(slots_);
    if (keys_.size() != slots_.size())
      fail(PyExc_ValueError, "one slot for each key: %zu keys, %zu slots", keys_.size(),
           slots_.size());
    blocks_.clear();
    hashes_.clear();
    checked([&] { index_.write_new(keys_, at, slots_, blocks_, hashes_); });
    return nb::make_tuple(numbers_of(blocks_), numbers_of(hashes_, [](std::uint64_t hash) {
                            return hash & bound::kMaxNumber;
                          }));
  }

  void set_num_last(std::size_t num_places) { index_.set_num_last(num_places); }
  void asked(nb::handle keys, double now) {
    bound::to_time(now);
    const GivenKeys given(keys);
    given.read(keys_);
    index_.leave_each_once(keys_);
    checked([&] { index_.asked(keys_, now); });
  }
  void retain(nb::handle keys, nb::handle said, double now) {
    bound::to_time(now);
    const policy::BlockHint it = bound::to_said(said);
    const GivenKeys given(keys);
    given.read(keys_);
    index_.leave_each_once(keys_);
    checked([&] { index_.retain(keys_, it, now); });
  }
  void continues(nb::handle keys, nb::handle before) {
    const GivenKeys given(keys);
    given.read(keys_);
    const trie::Label behind = bound::to_label(before.ptr());
    checked([&] { index_.continues(keys_, behind); });
  }
  // Positions of the keys.
  nb::object admit(nb::handle keys, nb::handle column, nb::handle num_free, double least_chance) {
    const std::size_t at = columns_.position(column);
    const std::size_t free = bound::to_limit(num_free);
    const GivenKeys given(keys);
    given.read(keys_);
    which_.clear();
    checked([&] { index_.admit(keys_, at, free, least_chance, which_); });
    return numbers_of(which_);
  }

  nb::object keys(nb::handle blocks) {
    read_blocks(blocks);
    return list_of(blocks_, [&](BlockId block) {
      const trie::Label key = checked([&] { return index_.key(block); });
      return nb::bytes(key.data, key.size);
    });
  }
  // (the keys, one after the other; the depths).
  nb::object facts(nb::handle blocks) {
    read_blocks(blocks);
    const std::size_t size = index_.rows().key_bytes();
    nb::object keys = owned(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks_.size() * size)));
    char* to = PyBytes_AS_STRING(keys.ptr());
    checked([&] {
      for (const BlockId block : blocks_) {
        std::memcpy(to, index_.key(block).data, size);
        to += size;
      }
    });
    return nb::make_tuple(
        keys, numbers_of(blocks_, [&](BlockId block) { return index_.depth(block); }));
  }
  std::uint32_t depth(nb::handle block) {
    return of(block, [&](BlockId id) { return index_.depth(id); });
  }

  void set_depths(nb::handle blocks, nb::handle depths) {
    pairs(blocks, depths, [&](BlockId block, Slot depth) { index_.set_depth(block, depth); });
  }
  void commit(nb::handle blocks, nb::handle column) {
    each(blocks, column, [&](BlockId block, std::size_t at) { index_.commit(block, at); });
  }
  // Blocks of one prompt, in its order: the first ones leave last.
  void commit_prompt(nb::handle blocks, nb::handle depths, nb::handle column) {
    const std::size_t at = columns_.position(column);
    pairs(blocks, depths, [&](BlockId block, Slot depth) { index_.set_depth(block, depth); });
    checked([&] {
      for (std::size_t i = blocks_.size(); i-- > 0;) index_.commit(blocks_[i], at);
    });
  }
  void touch(nb::handle blocks) {
    read_blocks(blocks);
    checked([&] { index_.touch(blocks_); });
  }

  bound::SlotLeases* slot_leases(nb::handle column, const nb::tuple& arrays, nb::handle num_leases,
                                 nb::handle is_reserved, std::uint64_t bit, std::uint64_t keeps) {
    return new bound::SlotLeases(index_, columns_.position(column), arrays, num_leases, is_reserved,
                                 bit, keeps);
  }

  // [(block, key, num_uses, depth, [(state, slot, leases) per column])] of every block.
  nb::object dump() {
    std::vector<Index> rows;
    index_.each([&](Index row) { rows.push_back(row); });
    return list_of(rows, [&](Index row) -> nb::object {
      const BlockId block = index_.id(row);
      const trie::Label key = index_.key(block);
      nb::list places;
      for (std::size_t column = 0; column < columns_.tiers().size(); ++column) {
        const keys::Standing& it = index_.rows().at(row, column);
        places.append(nb::make_tuple(states_[static_cast<std::size_t>(it.state) - 1],
                                     it.state == State::absent ? -1 : static_cast<long long>(it.slot),
                                     it.num_leases));
      }
      return nb::make_tuple(number(block), nb::bytes(key.data, key.size), index_.num_uses(block),
                            index_.depth(block), places);
    });
  }
  nb::object order(nb::handle column) {
    const std::size_t at = columns_.position(column);
    return numbers_of(checked([&] { return index_.order(at); }),
                      [&](Index row) { return index_.id(row); });
  }

 private:
  // Kept from call to call, to spare allocations.
  std::vector<trie::Label> keys_;
  std::vector<Index> rows_;
  std::vector<std::uint32_t> which_;
  std::vector<std::uint64_t> hashes_;
};

}  // namespace

void bind_key_index(nb::module_& module) {
  nb::class_<bound::SlotLeases>(module, "SlotLeases",
                                "Leases of one user: see kvtier.index.slot_leases.")
      .def("lease", &bound::SlotLeases::lease, nb::arg("blocks"), nb::arg("now"), nb::lock_self())
      .def("release", &bound::SlotLeases::release, nb::arg("slots"), nb::lock_self())
      .def("reserve", &bound::SlotLeases::reserve, nb::arg("slots"), nb::lock_self())
      .def("end_reserved", &bound::SlotLeases::end_reserved, nb::arg("slots"), nb::lock_self())
      .def("serve", &bound::SlotLeases::serve, nb::arg("content"), nb::arg("room"),
           nb::arg("key_bytes"), nb::arg("is_alone"), nb::arg("now"), nb::lock_self())
      .def("serve_reserve", &bound::SlotLeases::serve_reserve, nb::arg("content"), nb::arg("room"),
           nb::arg("key_bytes"), nb::arg("segments"), nb::arg("make_room"), nb::arg("mask"),
           nb::arg("has_overdue"), nb::arg("now"), nb::lock_self())
      .def("admits", &bound::SlotLeases::admits, nb::arg("num_free"), nb::lock_self())
      .def("serve_commit", &bound::SlotLeases::serve_commit, nb::arg("content"), nb::arg("room"),
           nb::lock_self());
  nb::class_<KeyIndex> type(module, "KeyIndex",
                            "Blocks by key, and where they are: see kvtier.index.");
  bound::bind_blocks(type);
  type.def(nb::init<nb::tuple, nb::tuple, nb::tuple, std::size_t>(), nb::arg("tiers"),
           nb::arg("policies"), nb::arg("states"), nb::arg("group_bytes"))
      .def("find", &KeyIndex::find, nb::arg("keys"), nb::lock_self())
      .def("missing", &KeyIndex::missing, nb::arg("keys"), nb::arg("tier"), nb::lock_self())
      .def("hashes", &KeyIndex::hashes, nb::arg("blocks"), nb::lock_self())
      .def("in_slots", &KeyIndex::in_slots, nb::arg("slots"), nb::arg("tier"), nb::lock_self())
      .def("expect", &KeyIndex::expect, nb::arg("num_blocks"), nb::lock_self())
      .def("make", &KeyIndex::make, nb::arg("keys"), nb::lock_self())
      .def("write_new", &KeyIndex::write_new, nb::arg("keys"), nb::arg("tier"), nb::arg("slots"),
           nb::lock_self())
      .def("set_num_last", &KeyIndex::set_num_last, nb::arg("num_places"), nb::lock_self())
      .def("asked", &KeyIndex::asked, nb::arg("keys"), nb::arg("now"), nb::lock_self())
      .def("retain", &KeyIndex::retain, nb::arg("keys"), nb::arg("block_hint"), nb::arg("now"),
           nb::lock_self())
      .def("continues", &KeyIndex::continues, nb::arg("keys"), nb::arg("before"), nb::lock_self())
      .def("admit", &KeyIndex::admit, nb::arg("keys"), nb::arg("tier"), nb::arg("num_free"),
           nb::arg("least_chance"), nb::lock_self())
      .def("keys", &KeyIndex::keys, nb::arg("blocks"), nb::lock_self())
      .def("facts", &KeyIndex::facts, nb::arg("blocks"), nb::lock_self())
      .def("depth", &KeyIndex::depth, nb::arg("block"), nb::lock_self())
      .def("set_depths", &KeyIndex::set_depths, nb::arg("blocks"), nb::arg("depths"),
           nb::lock_self())
      .def("commit", &KeyIndex::commit, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("commit_prompt", &KeyIndex::commit_prompt, nb::arg("blocks"), nb::arg("depths"),
           nb::arg("tier"), nb::lock_self())
      .def("touch", &KeyIndex::touch, nb::arg("blocks"), nb::lock_self())
      .def("slot_leases", &KeyIndex::slot_leases, nb::arg("tier"), nb::arg("arrays"),
           nb::arg("num_leases"), nb::arg("is_reserved"), nb::arg("bit"), nb::arg("keeps"), nb::lock_self(),
           nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("dump", &KeyIndex::dump, nb::lock_self())
      .def("order", &KeyIndex::order, nb::arg("tier"), nb::lock_self());
}

}  // namespace kvtier
