// What callers and structures of the core guarantee.
#pragma once

#include <stdexcept>

namespace kvtier {

// A caller broke a promise, or a check of invariants found that a structure did.
class BrokenPromise : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void promise(bool kept, const char* otherwise) {
  if (!kept) throw BrokenPromise(otherwise);
}

}  // namespace kvtier
