// Batches of reads or writes of one file through io_uring(7).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "uring/kernel.hpp"
#include "uring/queues.hpp"

namespace kvtier::uring {

struct Memory {
  std::uint64_t address;
  std::uint64_t num_bytes;

  bool has(std::uint64_t begin, std::int64_t size) const {
    return begin >= address && begin + static_cast<std::uint64_t>(size) <= address + num_bytes;
  }
};

// One block: `size` bytes at `offset` of the file and at `address` in memory.
struct Block {
  std::int64_t offset;
  std::uint64_t address;
  std::int64_t size;
};

enum class Way { read, write };

// Where to put the checksums of the first `num_bytes` bytes of each block; nullptr for nowhere.
struct Checks {
  std::uint32_t* crcs = nullptr;
  std::size_t num_bytes = 0;
};

// Queues of its own, for one file. Used by one thread at a time. Belongs to the process that made
// it, as its queues do; the destructor may run anywhere.
class Ring {
 public:
  // `depth` requests are under way at a time; larger blocks go in pieces of `piece_bytes`.
  // Neighbours in the file of at most `fuse_bytes` each go together, up to `piece_bytes`, wherever
  // they lie in memory; 0 for none.
  // Throws NativeError where the kernel has no io_uring, or does not allow it.
  Ring(int fd, unsigned depth, std::int64_t piece_bytes, bool is_direct,
       std::int64_t fuse_bytes = 0);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Throws NativeError in another process than the one that made the ring. Call it first, before
  // taking a lock: a lock that was held at the fork is never released in the child.
  void check_owner() const { queues_.check_owner(); }

  // Register the file, or memory, which saves the kernel a look-up per request. Return 0 or -errno.
  int register_file();
  int register_buffers(std::span<const Memory> buffers);

  // Moves all blocks; returns when nothing is under way any more. results[i]: bytes, or -errno.
  // After `deadline_s` nothing is begun, and what is under way is cancelled where that is possible.
  // checks: checksums of blocks that arrive whole, worked out while others are on their way.
  void transfer(Way way, std::span<const Block> blocks, std::optional<double> deadline_s,
                std::int64_t* results, const Checks& checks = {});

 private:
  struct Piece {  // what one request moves
    std::size_t block = 0;  // the first one, and how many
    std::size_t num = 1;
    std::int64_t begin = 0;  // within the first block
    std::int64_t size = 0;   // of all of it
  };
  struct State {  // of one block
    std::int64_t end;  // bytes from its start that are there, as far as is known
    std::int64_t left;  // bytes that have not been moved yet
    int error = 0;
  };

  void submit(Way way, std::span<const Block> blocks, std::size_t place);
  void set_memory(Way way, std::span<const Block> blocks, std::size_t place, kernel::Sqe& request);
  // The next piece that begins with `block`, from `begin` of it on.
  Piece piece_at(std::span<const Block> blocks, std::size_t block, std::int64_t begin) const;
  void cancel(std::size_t place);
  void complete(Way way, std::span<const Block> blocks, std::uint64_t place, int result,
                bool is_over);
  void advance(std::span<const Block> blocks, Piece& piece, std::int64_t num_bytes);
  void fail(const Piece& piece, int error);
  int buffer_of(std::uint64_t address, std::int64_t size) const;
  void check_whole(std::span<const Block> blocks, const Checks& checks);

  Queues queues_;
  int fd_ = -1;
  unsigned depth_ = 0;
  std::int64_t piece_bytes_ = 0;
  bool is_direct_ = false;
  std::int64_t fuse_bytes_ = 0;
  bool has_file_ = false;
  bool has_fixed_vectors_ = false;
  std::vector<Memory> buffers_;  // registered ones, by address

  // Of the batch that is being moved.
  std::vector<Piece> pieces_;                         // by place, 0 .. depth - 1
  std::vector<std::vector<kernel::Vector>> vectors_;  // by place
  std::vector<std::size_t> places_;                   // free ones
  std::vector<State> states_;
  std::vector<std::size_t> whole_;  // blocks that have arrived and are not checked yet
  std::vector<std::size_t> again_;  // places whose rest has to be submitted once more
  std::vector<Piece> apart_;        // whose request failed: to be moved block by block
};

}  // namespace kvtier::uring
