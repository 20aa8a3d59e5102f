// The columns of the trie, as Python names them, and what they are made of.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "policy/live.hpp"
#include "trie/types.hpp"

namespace kvtier::bound {

// The tiers by their names, fastest first.
class Columns {
 public:
  explicit Columns(nb::tuple tiers) : tiers_(std::move(tiers)) {}

  const nb::tuple& tiers() const { return tiers_; }

  std::size_t position(nb::handle tier) const {
    for (std::size_t at = 0; at < tiers_.size(); ++at)
      if (tiers_[at].ptr() == tier.ptr()) return at;
    for (std::size_t at = 0; at < tiers_.size(); ++at)
      if (tiers_[at].equal(tier)) return at;
    fail(PyExc_KeyError, "no tier %R; known tiers: %R", tier.ptr(), tiers_.ptr());
  }

 private:
  nb::tuple tiers_;
};

// The policy of each tier, by name.
inline std::vector<std::string_view> checked_policies(const nb::tuple& tiers,
                                                      const nb::tuple& policies) {
  if (tiers.size() < 1 || tiers.size() > trie::kMaxColumns || tiers.size() != policies.size())
    fail(PyExc_ValueError, "1 to %zu tiers with a policy each, not %zu tiers and %zu policies",
         trie::kMaxColumns, tiers.size(), policies.size());
  std::vector<std::string_view> names;
  for (const nb::handle each : policies) {
    if (!PyUnicode_Check(each.ptr()))
      fail(PyExc_TypeError, "a policy must be a str, not %s", Py_TYPE(each.ptr())->tp_name);
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(each.ptr(), &size);  // lives as long as `each`
    if (text == nullptr) throw nb::python_error();
    names.emplace_back(text, static_cast<std::size_t>(size));
    if (names.back() != policy::kLru && !policy::has_live(names.back()))
      fail(PyExc_ValueError, "no policy is called %R", each.ptr());
  }
  return names;
}

}  // namespace kvtier::bound
