// Check of invariants.
#pragma once

#include <stdexcept>

namespace kvtier::policy {

inline void promise(bool kept, const char* otherwise) {
  if (!kept) throw std::logic_error(otherwise);
}

}  // namespace kvtier::policy
