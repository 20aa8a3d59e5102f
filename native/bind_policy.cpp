// Binding of the policies, replayed and live. Arguments are checked here and trusted inside.
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
#include "bound_values.hpp"
#include "errors.hpp"
#include "policy/live_runs.hpp"
#include "policy/named_blocks.hpp"
#include "policy/replayed.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr long long kMaxBlocks = 1LL << 31;

std::size_t checked_capacity(long long capacity_blocks) {
  if (capacity_blocks < 1 || capacity_blocks > kMaxBlocks)
    fail(PyExc_ValueError, "capacity_blocks: %lld is not in 1 .. %lld", capacity_blocks, kMaxBlocks);
  return static_cast<std::size_t>(capacity_blocks);
}

double checked_time(double now_s) {
  if (!std::isfinite(now_s)) fail(PyExc_ValueError, "now_s must be a finite number of seconds");
  return now_s;
}

class PolicyReplay {
 public:
  PolicyReplay(const std::string& policy, long long capacity_blocks, std::uint64_t seed,
               double doubles_at_blocks) {
    const std::size_t capacity = checked_capacity(capacity_blocks);
    const double doubling = bound::to_doubling(doubles_at_blocks);
    policy_ = guarded([&] { return policy::make_replayed(policy, capacity, seed, doubling); });
    if (!policy_) fail(PyExc_ValueError, "no policy is called '%s'", policy.c_str());
  }

  std::size_t request(nb::handle keys, double now_s) {
    const Words words("keys", keys);
    now_ = std::max(now_, checked_time(now_s));
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
    bound::checked([&] { policy_->check(); });
  }

 private:
  std::unique_ptr<policy::Replayed> policy_;
  std::vector<policy::Key> path_;
  double now_ = -std::numeric_limits<double>::infinity();
};

// Names are the caller's keys, mixed: whatever these are, they spread.
class LivePolicy {
 public:
  LivePolicy(long long capacity_blocks, std::uint64_t seed, double doubles_at_blocks)
      : capacity_(checked_capacity(capacity_blocks)),
        policy_(capacity_, seed, bound::to_doubling(doubles_at_blocks), names_) {}

  std::size_t asked(nb::handle keys, double now_s) {
    read(keys);
    now_ = std::max(now_, checked_time(now_s));
    sorted_ = path_;
    std::sort(sorted_.begin(), sorted_.end());
    if (std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end())
      fail(PyExc_ValueError, "keys name whole prefixes: no two of a prompt are alike");
    return guarded([&] {
      names_.follow(path_, found_);
      policy_.asked(path_, found_, now_);
      return found_.size();
    });
  }
  void retain(nb::handle keys, nb::handle said, double now_s) {
    read(keys);
    const policy::BlockHint it = bound::to_said(said);
    now_ = std::max(now_, checked_time(now_s));
    guarded([&] {
      names_.follow(path_, found_);
      policy_.retain(path_, found_, it, now_);
    });
  }
  std::size_t admits(nb::handle keys, nb::handle kept) {
    read(keys);
    new_ = path_;
    read(kept);
    hold(true);
    which_.clear();
    guarded([&] { policy_.admit(new_, capacity_ - policy_.num_blocks(), 0.0, which_); });
    hold(false);
    return which_.size();
  }
  void entered(nb::handle keys) {
    read(keys);
    policy::Index behind = policy::kNone;
    for (std::size_t i = 0; i < path_.size(); ++i) {
      const policy::Index known = names_.find(path_[i]);
      if (known != policy::kNone) {
        behind = known;
        continue;
      }
      if (policy_.num_blocks() == capacity_)
        fail(PyExc_ValueError, "there is room for %zu blocks, and all of it is used", capacity_);
      guarded([&] {
        const policy::Index item = names_.add(path_[i]);
        policy_.entered(path_[i], item, {}, behind);
        behind = item;
        if (keys_.size() <= item) keys_.resize(item + 1);
        keys_[item] = given_[i];
      });
    }
  }
  nb::object victims(long long num_blocks, nb::handle kept) {
    read(kept);
    hold(true);
    left_.clear();
    guarded([&] {
      policy_.evict(static_cast<std::size_t>(std::max(0LL, num_blocks)), left_);
      hold(false);
      for (const policy::Index block : left_) names_.remove(block);
    });
    return bound::list_of(left_, [&](policy::Index block) { return bound::number(keys_[block]); });
  }
  void left(nb::handle keys) {
    read(keys);
    for (const policy::Key name : path_) {
      const policy::Index block = names_.find(name);
      if (block == policy::kNone) continue;
      names_.remove(block);
      policy_.left(block);
    }
  }

  std::size_t num_blocks() { return policy_.num_blocks(); }
  std::size_t num_history() { return policy_.num_history(); }
  std::size_t num_bytes() {
    return sizeof(*this) + policy_.num_bytes() + names_.num_bytes() +
           keys_.capacity() * sizeof(policy::Key);
  }
  void check_invariants() {
    bound::checked([&] { policy_.check(); });
  }

 private:
  void read(nb::handle keys) {
    const Words words("keys", keys);
    given_.assign(words.data(), words.data() + words.size());
    path_.resize(given_.size());
    std::transform(given_.begin(), given_.end(), path_.begin(),
                   [](policy::Key key) { return policy::mixed(key + policy::kStep); });
  }
  void hold(bool is_held) {
    for (const policy::Key name : path_)
      if (const policy::Index block = names_.find(name); block != policy::kNone)
        names_.hold(block, is_held);
  }

  std::size_t capacity_;
  policy::NamedBlocks names_;
  policy::LiveRuns policy_;
  std::vector<policy::Key> keys_;  // by block, as they were given
  double now_ = -std::numeric_limits<double>::infinity();
  // Of the call.
  std::vector<policy::Key> given_, path_, new_, sorted_;
  std::vector<policy::Index> found_, left_;
  std::vector<std::uint32_t> which_;
};

}  // namespace

void bind_policy(nb::module_& module) {
  nb::class_<LivePolicy>(module, "LivePolicy",
                         "The policy that works on runs, live: see kvtier.index.policies.live.")
      .def(nb::init<long long, std::uint64_t, double>(), nb::arg("capacity_blocks"),
           nb::arg("seed") = 7, nb::arg("doubles_at_blocks") = 0.0)
      .def("asked", &LivePolicy::asked, nb::arg("keys").none(), nb::arg("now_s"), nb::lock_self(),
           nb::sig("def asked(self, keys: NDArray[uint64], now_s: float) -> int"))
      .def("retain", &LivePolicy::retain, nb::arg("keys").none(), nb::arg("block_hint").none(),
           nb::arg("now_s"), nb::lock_self(),
           nb::sig("def retain(self, keys: NDArray[uint64], block_hint: BlockHint, now_s: float) -> None"))
      .def("admits", &LivePolicy::admits, nb::arg("keys").none(), nb::arg("kept").none(),
           nb::lock_self(),
           nb::sig("def admits(self, keys: NDArray[uint64], kept: NDArray[uint64]) -> int"))
      .def("entered", &LivePolicy::entered, nb::arg("keys").none(), nb::lock_self(),
           nb::sig("def entered(self, keys: NDArray[uint64]) -> None"))
      .def("victims", &LivePolicy::victims, nb::arg("num_blocks"), nb::arg("kept").none(),
           nb::lock_self(),
           nb::sig("def victims(self, num_blocks: int, kept: NDArray[uint64]) -> list[int]"))
      .def("left", &LivePolicy::left, nb::arg("keys").none(), nb::lock_self(),
           nb::sig("def left(self, keys: NDArray[uint64]) -> None"))
      .def("num_blocks", &LivePolicy::num_blocks, nb::lock_self())
      .def("num_history", &LivePolicy::num_history, nb::lock_self())
      .def("num_bytes", &LivePolicy::num_bytes, nb::lock_self())
      .def("check_invariants", &LivePolicy::check_invariants, nb::lock_self());
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
