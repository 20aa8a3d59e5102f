// Values that a server sends one behind the other, as RESP has them, each to where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvtier::net {

// Where values go: value v to `num_pieces` pieces, size[p] bytes at address[p], from
// p = v * num_pieces on. Not owned.
struct Places {
  const std::uint64_t* address;
  const std::uint64_t* size;
  std::size_t num_values;
  std::size_t num_pieces;
};

// num: values that are whole, the first ones. rest: what has come behind them. error: of errno.h;
// ETIMEDOUT for what came too late, ECONNRESET where the server has closed the connection, EPROTO for
// a value that does not end where it should; 0 where all have come, or another reply has.
struct Received {
  std::size_t num;
  std::string rest;
  int error;
};

// Receives values from the blocking socket `fd` until something comes that does not begin with
// `line`, the first line of a value that fills its places; such a reply is left, and nothing of it
// goes to a place. `held` came before. `num_due` replies come after these values. All by `until`,
// seconds of the monotonic clock. A call of the system's is for a whole value and the line behind it.
Received receive_values(int fd, std::string_view line, std::string_view held, const Places& places,
                        std::size_t num_due, double until);

}  // namespace kvtier::net
