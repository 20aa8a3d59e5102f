// The columns of the trie, as Python names them, and what they are made of.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

// A column is (tier, group); a tier alone is the column of the first group. They are numbered group
// by group.
class Columns {
 public:
  Columns(nb::tuple tiers, std::size_t num_groups)
      : tiers_(std::move(tiers)), num_groups_(num_groups) {}

  const nb::tuple& tiers() const { return tiers_; }

  std::size_t position(nb::handle column) const {
    for (std::size_t at = 0; at < tiers_.size(); ++at)
      if (tiers_[at].ptr() == column.ptr()) return at;
    if (!PyTuple_Check(column.ptr()) || PyTuple_GET_SIZE(column.ptr()) != 2)
      return tier_position(column, column);
    const std::size_t group = group_position(PyTuple_GET_ITEM(column.ptr(), 1), column);
    return group * tiers_.size() + tier_position(PyTuple_GET_ITEM(column.ptr(), 0), column);
  }

 private:
  std::size_t tier_position(nb::handle tier, nb::handle column) const {
    for (std::size_t at = 0; at < tiers_.size(); ++at)
      if (tiers_[at].equal(tier)) return at;
    fail(PyExc_KeyError, "no column %R; known tiers: %R", column.ptr(), tiers_.ptr());
  }

  std::size_t group_position(nb::handle group, nb::handle column) const {
    const Py_ssize_t at = PyLong_Check(group.ptr()) ? PyLong_AsSsize_t(group.ptr()) : -1;
    if (at == -1) PyErr_Clear();  // too large a number
    if (at < 0 || static_cast<std::size_t>(at) >= num_groups_)
      fail(PyExc_KeyError, "no column %R; there are %zu groups", column.ptr(), num_groups_);
    return static_cast<std::size_t>(at);
  }

  nb::tuple tiers_;
  std::size_t num_groups_;
};

inline std::vector<std::string_view> names_of(const nb::tuple& names) {
  std::vector<std::string_view> result;
  for (const nb::handle each : names) {
    if (!PyUnicode_Check(each.ptr()))
      fail(PyExc_TypeError, "a policy must be a str, not %s", Py_TYPE(each.ptr())->tp_name);
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(each.ptr(), &size);  // lives as long as `each`
    if (text == nullptr) throw nb::python_error();
    result.emplace_back(text, static_cast<std::size_t>(size));
  }
  return result;
}

// Per group, how many blocks a cut needs of it; None for all.
inline std::vector<std::size_t> limits_of(const nb::tuple& limits) {
  std::vector<std::size_t> result;
  for (const nb::handle each : limits) {
    const Py_ssize_t num = each.is_none() ? 0 : PyNumber_AsSsize_t(each.ptr(), PyExc_ValueError);
    if (num == -1 && PyErr_Occurred()) throw nb::python_error();
    if (num < 0) fail(PyExc_ValueError, "a group needs 0 blocks or more, not %zd", num);
    result.push_back(each.is_none() ? trie::kAll : static_cast<std::size_t>(num));
  }
  return result;
}

// A tuple per group of make(block, group) per block.
template <typename Make>
nb::object table_of(std::size_t num_groups, std::size_t num_blocks, Make&& make) {
  nb::object rows = owned(PyTuple_New(static_cast<Py_ssize_t>(num_groups)));
  for (std::size_t group = 0; group < num_groups; ++group) {
    nb::object row = owned(PyTuple_New(static_cast<Py_ssize_t>(num_blocks)));
    for (std::size_t i = 0; i < num_blocks; ++i)
      PyTuple_SET_ITEM(row.ptr(), static_cast<Py_ssize_t>(i), make(i, group).release().ptr());
    PyTuple_SET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(group), row.release().ptr());
  }
  return rows;
}

}  // namespace kvtier::bound
