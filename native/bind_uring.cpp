// Binding of the io_uring engine. Arguments are checked here and trusted inside.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "errors.hpp"
#include "given_arrays.hpp"
#include "uring/ring.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using Numbers = Items<std::int64_t>;

constexpr double kLongestDeadlineS = 1e9;  // the kernel counts nanoseconds with 64 bits
constexpr long long kMaxDepth = 4096;
constexpr long long kMaxPieceBytes = 1ll << 30;  // a request has 32 bits for its size

class UringRing {
 public:
  UringRing(int fd, long long depth, long long piece_bytes, bool is_direct,
            long long fuse_bytes) {
    if (depth < 1 || depth > kMaxDepth)
      fail(PyExc_ValueError, "depth must be between 1 and %lld, not %lld", kMaxDepth, depth);
    if (piece_bytes < 4096 || piece_bytes > kMaxPieceBytes || piece_bytes % 4096 != 0)
      fail(PyExc_ValueError, "piece_bytes must be a multiple of 4096 up to %lld, not %lld",
           kMaxPieceBytes, piece_bytes);
    if (fuse_bytes < 0 || fuse_bytes > piece_bytes)
      fail(PyExc_ValueError, "fuse_bytes must be between 0 and piece_bytes=%lld, not %lld",
           piece_bytes, fuse_bytes);
    ring_ = guarded([&] {
      return std::make_unique<uring::Ring>(fd, static_cast<unsigned>(depth), piece_bytes,
                                           is_direct, fuse_bytes);
    });
  }

  int register_file() {
    guarded([&] { ring_->check_owner(); });
    const nb::gil_scoped_release others_may_run;
    const std::lock_guard one_at_a_time(mutex_);
    return ring_->register_file();
  }

  int register_buffers(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& buffers) {
    guarded([&] { ring_->check_owner(); });
    std::vector<uring::Memory> pieces;
    for (const auto& [address, num_bytes] : buffers) pieces.push_back({address, num_bytes});
    const nb::gil_scoped_release others_may_run;
    const std::lock_guard one_at_a_time(mutex_);
    return guarded([&] { return ring_->register_buffers(pieces); });
  }

  // deadline_s: None, or more than kLongestDeadlineS, for none. num_checked: first bytes of each
  // block that the checksum covers.
  nb::tuple transfer(bool write, nb::handle offsets, nb::handle addresses, nb::handle sizes,
                     std::optional<double> deadline_s, std::optional<std::uint64_t> num_checked) {
    guarded([&] { ring_->check_owner(); });
    if (deadline_s && std::isnan(*deadline_s))
      fail(PyExc_ValueError, "deadline_s must be a number of seconds or None, not nan");
    if (deadline_s && *deadline_s > kLongestDeadlineS) deadline_s.reset();
    const Numbers offset("offsets", offsets);
    const Words address("addresses", addresses);
    const Numbers size("sizes", sizes);
    if (offset.size() != address.size() || offset.size() != size.size())
      fail(PyExc_ValueError,
           "offsets, addresses and sizes must have equal lengths, not %zu, %zu and %zu",
           offset.size(), address.size(), size.size());
    std::vector<uring::Block> blocks(offset.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      blocks[i] = {offset.data()[i], address.data()[i], size.data()[i]};
      constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
      if (blocks[i].offset < 0 || blocks[i].size < 0 || blocks[i].size > kMax - blocks[i].offset)
        fail(PyExc_ValueError, "block %zu: %lld bytes at offset %lld lie in no file", i,
             static_cast<long long>(blocks[i].size), static_cast<long long>(blocks[i].offset));
      check_memory("addresses", i, blocks[i].address, static_cast<std::uint64_t>(blocks[i].size));
    }
    auto results = std::make_unique<std::int64_t[]>(blocks.size());
    auto crcs = num_checked ? std::make_unique<std::uint32_t[]>(blocks.size()) : nullptr;
    {
      const nb::gil_scoped_release others_may_run;
      const std::lock_guard one_at_a_time(mutex_);
      guarded([&] {
        ring_->transfer(write ? uring::Way::write : uring::Way::read, blocks, deadline_s,
                        results.get(),
                        {crcs.get(), static_cast<std::size_t>(num_checked.value_or(0))});
      });
    }
    const std::size_t num = blocks.size();
    nb::object checksums = num_checked ? nb::cast(owned(std::move(crcs), num)) : nb::none();
    return nb::make_tuple(owned(std::move(results), num), checksums);
  }

 private:
  std::unique_ptr<uring::Ring> ring_;
  // Never held while Python is waited for, so neither lock can hold up the other.
  std::mutex mutex_;
};

}  // namespace

void bind_uring(nb::module_& module) {
  nb::class_<UringRing>(module, "UringRing",
                        "Batches of reads or writes of one file, one after the other.")
      .def(nb::init<int, long long, long long, bool, long long>(), nb::arg("fd"), nb::arg("depth"),
           nb::arg("piece_bytes"), nb::arg("is_direct"), nb::arg("fuse_bytes") = 0)
      .def("register_file", &UringRing::register_file)
      .def("register_buffers", &UringRing::register_buffers, nb::arg("buffers"))
      .def("transfer", &UringRing::transfer, nb::arg("write"), nb::arg("offsets"),
           nb::arg("addresses"), nb::arg("sizes"), nb::arg("deadline_s").none(),
           nb::arg("num_checked").none() = nb::none(),
           nb::sig("def transfer(self, write: bool, offsets: NDArray[int64], "
                   "addresses: NDArray[uint64], sizes: NDArray[int64], "
                   "deadline_s: float | None, num_checked: int | None = None) -> "
                   "tuple[NDArray[int64], NDArray[uint32] | None]"));
}

}  // namespace kvtier
