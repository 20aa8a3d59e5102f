// The batched copy.
#pragma once

#include <cstddef>

#include "copy/fragments.hpp"

namespace kvtier::copy {

// Copies every fragment of the list, on up to `num_threads` threads, and returns when all bytes are
// copied. No destination may overlap another destination or any source. `num_bytes` is the sum of
// the sizes.
void copy_batch(const Fragments& list, std::size_t num_bytes, std::size_t num_threads);

}  // namespace kvtier::copy
