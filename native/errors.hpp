// The one exception type that leaves the core.
#pragma once

#include <exception>
#include <stdexcept>
#include <utility>

namespace kvtier {

// What Python sees of an error inside the core, as kvtier._native.NativeError. Bad arguments are
// found at the border and are TypeError or ValueError.
class NativeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Calls into the core, and translates its exceptions to NativeError.
template <typename Call>
auto guarded(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const std::exception& error) {
    throw NativeError(error.what());
  }
}

}  // namespace kvtier
