// Values that a server sends one behind the other, as RESP has them, each to where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::net {

// Where values go: value v to `num_pieces` pieces, size[p] bytes at address[p], from
// p = v * num_pieces on. num_heads: the first of its pieces, which no checksum is of. Not owned.
struct Places {
  const std::uint64_t* address;
  const std::uint64_t* size;
  std::size_t num_values;
  std::size_t num_pieces;
  std::size_t num_heads;
};

// crcs: crc32c of each value that is whole, the first ones, taken while it comes. rest: what has come
// behind them. error: of errno.h; ETIMEDOUT for what came too late, ECONNRESET where the server has closed the connection, EPROTO for
// a value that does not end where it should; 0 where all have come, or another reply has.
struct Received {
  std::vector<std::uint32_t> crcs;
  std::string rest;
  int error;
};

// Receives values from the blocking socket `fd` until something comes that does not begin with
// `line`, the first line of a value that fills its places; such a reply is left, and nothing of it
// goes to a place. `held` came before. `num_due` replies come after these values. All by `until`,
// seconds of the monotonic clock. A call of the system's is for a whole value and the line behind it,
// or for as much of it as stays in a cache until it has its checksum.
Received receive_values(int fd, std::string_view line, std::string_view held, const Places& places,
                        std::size_t num_due, double until);

}  // namespace kvtier::net
