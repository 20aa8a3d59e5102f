// Binding of the policies that are replayed. Arguments are checked here and trusted inside.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "policy/replayed.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr long long kMaxBlocks = 1LL << 31;

class PolicyReplay {
 public:
  PolicyReplay(const std::string& policy, long long capacity_blocks, std::uint64_t seed,
               double doubles_at_blocks) {
    if (capacity_blocks < 1 || capacity_blocks > kMaxBlocks)
      fail(PyExc_ValueError, "capacity_blocks: %lld is not in 1 .. %lld", capacity_blocks,
           kMaxBlocks);
    if (!(doubles_at_blocks >= 0.0) || std::isinf(doubles_at_blocks))
      fail(PyExc_ValueError, "doubles_at_blocks must be 0 or a number of blocks above it");
    policy_ = guarded([&] {
      return policy::make_replayed(policy, static_cast<std::size_t>(capacity_blocks), seed,
                                   doubles_at_blocks);
    });
    if (!policy_) fail(PyExc_ValueError, "no policy is called '%s'", policy.c_str());
  }

  std::size_t request(nb::handle keys, double now_s) {
    const Words words("keys", keys);
    if (!std::isfinite(now_s)) fail(PyExc_ValueError, "now_s must be a finite number of seconds");
    now_ = std::max(now_, now_s);
    path_.resize(words.size());
    policy::Key before = 0;
    for (std::size_t i = 0; i < words.size(); ++i)
      path_[i] = before = policy::chained(before, words.data()[i]);
    return guarded([&] { return policy_->request(path_, now_); });
  }

  std::size_t num_blocks() { return policy_->num_blocks(); }
  std::size_t num_stored() { return policy_->num_stored(); }
  std::size_t num_history() { return policy_->num_history(); }
  std::size_t num_bytes() { return policy_->num_bytes(); }
  void check_invariants() {
    try {
      policy_->check();
    } catch (const std::logic_error& error) {
      fail(PyExc_AssertionError, "%s", error.what());
    }
  }

 private:
  std::unique_ptr<policy::Replayed> policy_;
  std::vector<policy::Key> path_;
  double now_ = -std::numeric_limits<double>::infinity();
};

}  // namespace

void bind_policy(nb::module_& module) {
  nb::class_<PolicyReplay>(module, "PolicyReplay",
                           "A policy, replayed: see kvtier.index.policies.replayed.")
      .def(nb::init<const std::string&, long long, std::uint64_t, double>(), nb::arg("policy"),
           nb::arg("capacity_blocks"), nb::arg("seed") = 7, nb::arg("doubles_at_blocks") = 0.0)
      .def("request", &PolicyReplay::request, nb::arg("keys").none(), nb::arg("now_s"),
           nb::lock_self(),
           nb::sig("def request(self, keys: NDArray[uint64], now_s: float) -> int"))
      .def("num_blocks", &PolicyReplay::num_blocks, nb::lock_self())
      .def("num_stored", &PolicyReplay::num_stored, nb::lock_self())
      .def("num_history", &PolicyReplay::num_history, nb::lock_self())
      .def("num_bytes", &PolicyReplay::num_bytes, nb::lock_self())
      .def("check_invariants", &PolicyReplay::check_invariants, nb::lock_self());
}

}  // namespace kvtier
