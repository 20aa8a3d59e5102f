// The two queues of an io_uring(7), as this process and the kernel share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "uring/kernel.hpp"

namespace kvtier::uring {

// Requests are put into one queue; completions with their user_data are taken from the other. Used
// by one thread at a time. Linux only: elsewhere the constructor throws.
//
// A child made by fork shares the kernel's side with its parent: it would unregister files and
// memory for both, and either process would get the completions. Queues therefore belong to the
// process that made them. The destructor may run in any process.
class Queues {
 public:
  // Room for `num_requests` at a time. Throws NativeError where the kernel has no io_uring, or does
  // not allow it.
  explicit Queues(unsigned num_requests);
  ~Queues();
  Queues(const Queues&) = delete;
  Queues& operator=(const Queues&) = delete;

  // Throws NativeError in another process than the one that made them.
  void check_owner() const;
  // Whether the kernel supports a request.
  bool knows(std::uint8_t opcode) const;

  // Register the file, which then has the number 0, or memory. This saves the kernel a look-up per
  // request. Return 0 or -errno. The destructor unregisters both.
  int register_file(int fd);
  int register_buffers(std::span<const kernel::Vector> buffers);

  // The next request to go, all zeros.
  kernel::Sqe& next();
  // Submits what waits, and returns when `num_wanted` completions are there or the time is over.
  // 0 or -errno.
  int enter(unsigned num_wanted, std::optional<double> timeout_s);

  // Calls visit(completion) for each that is there.
  template <typename Visit>
  void take(Visit&& visit) {
    unsigned* const head = rings_.at<unsigned>(params_.cq.head);
    const unsigned mask = *rings_.at<unsigned>(params_.cq.ring_mask);
    const auto* const completions = rings_.at<kernel::Cqe>(params_.cq.cqes);
    unsigned at = load(head);
    for (const unsigned end = load(rings_.at<unsigned>(params_.cq.tail)); at != end; ++at)
      visit(completions[at & mask]);
    store(head, at);
  }

 private:
  class Mapping {
   public:
    Mapping() = default;
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    void map(int fd, std::size_t num_bytes, std::uint64_t offset);
    template <typename Item>
    Item* at(std::size_t offset) const {
      return reinterpret_cast<Item*>(static_cast<std::byte*>(start_) + offset);
    }

   private:
    void* start_ = nullptr;
    std::size_t num_bytes_ = 0;
  };
  class Descriptor {
   public:
    ~Descriptor();
    int number = -1;
  };

  static unsigned load(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store(unsigned* word, unsigned value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }

  long owner_ = 0;  // process id
  Descriptor ring_;
  Mapping rings_;
  Mapping requests_;
  kernel::Params params_{};
  unsigned tail_ = 0;  // of the submission queue, ahead of what the kernel knows
  bool has_file_ = false;
  bool has_buffers_ = false;
};

}  // namespace kvtier::uring
