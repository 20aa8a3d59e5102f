#include "uring/ring.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "crc/crc32c.hpp"

namespace kvtier::uring {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kIsCancel = ~std::uint64_t{0};
constexpr std::int64_t kPage = 4096;
constexpr std::size_t kMaxVectors = 256;  // of one request: what the kernel puts into one bio

}  // namespace

Ring::Ring(int fd, unsigned depth, std::int64_t piece_bytes, bool is_direct,
           std::int64_t fuse_bytes)
    : queues_(2 * depth),  // room for a cancellation of each request, too
      fd_(fd),
      depth_(depth),
      piece_bytes_(piece_bytes),
      is_direct_(is_direct),
      fuse_bytes_(std::min(fuse_bytes, piece_bytes)),
      pieces_(depth),
      vectors_(fuse_bytes_ > 0 ? depth : 0) {
  for (std::size_t place = depth; place-- > 0;) places_.push_back(place);
  // Nothing may fail for want of memory while buffers are in use.
  again_.reserve(depth);
  apart_.reserve(depth);
  for (auto& each : vectors_) each.reserve(kMaxVectors);
  has_fixed_vectors_ =
      queues_.knows(kernel::kReadVectorFixed) && queues_.knows(kernel::kWriteVectorFixed);
}

int Ring::register_file() {
  const int result = queues_.register_file(fd_);
  has_file_ = result >= 0;
  return result;
}

int Ring::register_buffers(std::span<const Memory> buffers) {
  std::vector<kernel::Vector> vectors;
  for (const Memory& each : buffers) vectors.push_back({each.address, each.num_bytes});
  const int result = queues_.register_buffers(vectors);
  if (result >= 0) buffers_.assign(buffers.begin(), buffers.end());
  return result;
}

int Ring::buffer_of(std::uint64_t address, std::int64_t size) const {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].has(address, size)) return static_cast<int>(i);
  }
  return -1;
}

void Ring::submit(Way way, std::span<const Block> blocks, std::size_t place) {
  const Piece& piece = pieces_[place];
  kernel::Sqe& request = queues_.next();
  request.fd = has_file_ ? 0 : fd_;
  request.flags = has_file_ ? kernel::kFixedFile : std::uint8_t{0};
  request.offset = static_cast<std::uint64_t>(blocks[piece.block].offset + piece.begin);
  request.user_data = place;
  set_memory(way, blocks, place, request);
}

void Ring::set_memory(Way way, std::span<const Block> blocks, std::size_t place,
                      kernel::Sqe& request) {
  const Piece& piece = pieces_[place];
  const bool is_read = way == Way::read;
  const std::uint64_t address =
      blocks[piece.block].address + static_cast<std::uint64_t>(piece.begin);
  if (piece.num == 1) {
    const int buffer = buffer_of(address, piece.size);
    request.opcode = buffer < 0 ? (is_read ? kernel::kRead : kernel::kWrite)
                                : (is_read ? kernel::kReadFixed : kernel::kWriteFixed);
    request.address = address;
    request.size = static_cast<std::uint32_t>(piece.size);
    request.buffer = static_cast<std::uint16_t>(std::max(buffer, 0));
    return;
  }
  auto& vectors = vectors_[place];
  vectors.clear();
  const std::int64_t first_size = blocks[piece.block].size - piece.begin;
  int buffer = has_fixed_vectors_ ? buffer_of(address, first_size) : -1;
  vectors.push_back({address, static_cast<std::uint64_t>(first_size)});
  for (const Block& each : blocks.subspan(piece.block + 1, piece.num - 1)) {
    vectors.push_back({each.address, static_cast<std::uint64_t>(each.size)});
    if (buffer >= 0 && !buffers_[static_cast<std::size_t>(buffer)].has(each.address, each.size))
      buffer = -1;  // a request names one buffer
  }
  request.opcode = buffer < 0 ? (is_read ? kernel::kReadVector : kernel::kWriteVector)
                              : (is_read ? kernel::kReadVectorFixed : kernel::kWriteVectorFixed);
  request.address = reinterpret_cast<std::uint64_t>(vectors.data());
  request.size = static_cast<std::uint32_t>(vectors.size());
  request.buffer = static_cast<std::uint16_t>(std::max(buffer, 0));
}

Ring::Piece Ring::piece_at(std::span<const Block> blocks, std::size_t block,
                           std::int64_t begin) const {
  Piece piece{block, 1, begin, std::min(piece_bytes_, blocks[block].size - begin)};
  if (begin > 0 || blocks[block].size > fuse_bytes_) return piece;
  for (std::size_t next = block + 1; next < blocks.size() && piece.num < kMaxVectors; ++next) {
    const Block& one = blocks[next];
    const bool is_small = one.size > 0 && one.size <= fuse_bytes_;
    if (!is_small || one.offset != blocks[block].offset + piece.size) break;
    if (piece.size + one.size > piece_bytes_) break;
    piece.size += one.size;
    ++piece.num;
  }
  return piece;
}

void Ring::cancel(std::size_t place) {
  kernel::Sqe& request = queues_.next();
  request.opcode = kernel::kCancel;
  request.fd = -1;
  request.address = place;
  request.user_data = kIsCancel;
}

void Ring::complete(Way way, std::span<const Block> blocks, std::uint64_t place, int result,
                    bool is_over) {
  Piece& piece = pieces_[place];
  if (result == -EINTR || result == -EAGAIN) {
    if (is_over)
      result = -ECANCELED;
    else {
      again_.push_back(place);
      return;
    }
  }
  if (result == 0 && way == Way::write && piece.size > 0) result = -EIO;  // a file has no end there
  if (result < 0) {
    if (piece.num > 1 && result != -ECANCELED)
      apart_.push_back(piece);  // whichever of them it is about
    else
      fail(piece, result);
  } else if (result < piece.size) {
    advance(blocks, piece, result);
    const bool is_end =
        result == 0 || (way == Way::read && is_direct_ && result % kPage != 0);
    if (is_end) {
      for (std::size_t i = 0; i < piece.num; ++i) {
        State& state = states_[piece.block + i];
        state.end = std::min(state.end, i == 0 ? piece.begin : 0);
      }
    } else if (is_over) {
      fail(piece, -ECANCELED);
    } else if (states_[piece.block].error == 0) {
      again_.push_back(place);
      return;
    }
  } else {
    advance(blocks, piece, result);
  }
  places_.push_back(place);
}

// So many bytes of a piece have been moved.
void Ring::advance(std::span<const Block> blocks, Piece& piece, std::int64_t num_bytes) {
  piece.size -= num_bytes;
  while (num_bytes > 0) {
    const std::int64_t here = std::min(num_bytes, blocks[piece.block].size - piece.begin);
    State& state = states_[piece.block];
    state.left -= here;
    if (state.left == 0) whole_.push_back(piece.block);
    num_bytes -= here;
    piece.begin += here;
    if (piece.num > 1 && piece.begin == blocks[piece.block].size) {
      ++piece.block;
      --piece.num;
      piece.begin = 0;
    }
  }
}

void Ring::fail(const Piece& piece, int error) {
  for (std::size_t i = 0; i < piece.num; ++i) {
    State& state = states_[piece.block + i];
    if (state.error == 0) state.error = error;
  }
}

void Ring::check_whole(std::span<const Block> blocks, const Checks& checks) {
  for (const std::size_t block : whole_) {
    const auto* const data = reinterpret_cast<const std::byte*>(blocks[block].address);
    const auto size = static_cast<std::size_t>(blocks[block].size);
    checks.crcs[block] = crc::crc32c(data, std::min(checks.num_bytes, size));
  }
  whole_.clear();
}

void Ring::transfer(Way way, std::span<const Block> blocks, std::optional<double> deadline_s,
                    std::int64_t* results, const Checks& checks) {
  const auto began = Clock::now();
  const auto left_s = [&]() -> std::optional<double> {
    if (!deadline_s) return std::nullopt;
    return *deadline_s - std::chrono::duration<double>(Clock::now() - began).count();
  };
  states_.clear();
  for (const Block& block : blocks) states_.push_back({block.size, block.size});
  whole_.clear();
  whole_.reserve(blocks.size());  // nothing may fail for want of memory while buffers are in use
  again_.clear();
  apart_.clear();
  std::size_t block = 0;       // the next piece to begin: of this block,
  std::int64_t begin = 0;      // from here on
  bool is_over = false;        // the deadline has passed
  bool was_cancelled = false;  // and requests in flight have been cancelled
  while (true) {
    if (!is_over && deadline_s && *left_s() <= 0) is_over = true;
    if (!is_over) {
      while (!again_.empty()) {
        const std::size_t place = again_.back();
        again_.pop_back();
        submit(way, blocks, place);
      }
      while (!apart_.empty() && !places_.empty()) {
        Piece& piece = apart_.back();
        const std::size_t place = places_.back();
        places_.pop_back();
        pieces_[place] = {piece.block, 1, piece.begin, blocks[piece.block].size - piece.begin};
        piece = {piece.block + 1, piece.num - 1, 0, 0};
        if (piece.num == 0) apart_.pop_back();
        submit(way, blocks, place);
      }
      while (block < blocks.size() && !places_.empty()) {
        if (begin >= blocks[block].size || states_[block].error != 0) {
          ++block;
          begin = 0;
          continue;
        }
        const std::size_t place = places_.back();
        places_.pop_back();
        const Piece& piece = pieces_[place] = piece_at(blocks, block, begin);
        begin = piece.num == 1 ? begin + piece.size : 0;
        if (piece.num > 1) block += piece.num;
        submit(way, blocks, place);
      }
    } else {
      for (const std::size_t place : again_) {
        fail(pieces_[place], -ECANCELED);
        places_.push_back(place);
      }
      for (const Piece& piece : apart_) fail(piece, -ECANCELED);
      again_.clear();
      apart_.clear();
    }
    if (checks.crcs == nullptr) {
      whole_.clear();
    } else if (!whole_.empty()) {
      queues_.enter(0, std::nullopt);  // the disk works during the checksums
      check_whole(blocks, checks);
    }
    const std::size_t num_running = depth_ - places_.size();
    if (num_running == 0) break;
    if (is_over && !was_cancelled) {
      was_cancelled = true;
      for (std::size_t place = 0; place < depth_; ++place)
        if (std::find(places_.begin(), places_.end(), place) == places_.end()) cancel(place);
    }
    // While there is more to begin, a quarter of the depth at a time spares system calls.
    const bool is_last = is_over || (block >= blocks.size() && apart_.empty());
    const std::size_t wanted = is_last ? 1 : std::max<std::size_t>(1, depth_ / 4);
    const int entered = queues_.enter(static_cast<unsigned>(std::min(wanted, num_running)),
                                      is_over ? std::nullopt : left_s());
    // The kernel uses the buffers, so the call must be repeated until it succeeds; not in a busy
    // loop.
    if (entered < 0 && entered != -ETIME && entered != -EINTR)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    queues_.take([&](const kernel::Cqe& event) {
      if (event.user_data != kIsCancel)
        complete(way, blocks, event.user_data, event.result, is_over);
    });
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const bool was_begun = i < block || (i == block && begin >= blocks[i].size);
    if (states_[i].error != 0)
      results[i] = states_[i].error;
    else
      results[i] = was_begun ? states_[i].end : -ECANCELED;
  }
}

}  // namespace kvtier::uring
