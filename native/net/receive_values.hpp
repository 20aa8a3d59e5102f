// Receives values of RESP replies, each directly into its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::net {

// Destinations of values. Value v goes to `num_pieces` pieces, size[p] bytes at address[p], from
// p = v * num_pieces on. num_heads: number of its first pieces that the checksum leaves out. Not
// owned.
struct Places {
  const std::uint64_t* address;
  const std::uint64_t* size;
  std::size_t num_values;
  std::size_t num_pieces;
  std::size_t num_heads;
};

// crcs: crc32c of each complete value, from the first one on. rest: bytes received behind them.
// error: of errno.h; ETIMEDOUT after the deadline, ECONNRESET if the server has closed the
// connection, EPROTO for a value with another end than expected; 0 if all values, or another reply,
// have been received.
struct Received {
  std::vector<std::uint32_t> crcs;
  std::string rest;
  int error;
};

// Receives values from the blocking socket `fd`, until a reply does not begin with `line`, the
// first line of a value of the right size. Such a reply is returned in `rest`, and not written to a
// place. `held`: bytes received before. `num_due`: replies that follow these values. until:
// deadline, in seconds of the monotonic clock. A system call receives a whole value and the line
// behind it, or as much of a value as stays in a cache until its checksum is computed.
Received receive_values(int fd, std::string_view line, std::string_view held, const Places& places,
                        std::size_t num_due, double until);

}  // namespace kvtier::net
