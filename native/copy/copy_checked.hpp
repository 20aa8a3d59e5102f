// The batched copy with checksums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/fragments.hpp"

namespace kvtier::copy {

// Copies every fragment of the list, as `copy_batch` does, on the calling thread. A block is
// `num_pieces` fragments in a row; checksum[b] becomes the crc32c of block b, one piece after the
// other. Each byte is read once, so the checksums are of the bytes at the destination, even if the
// source is written meanwhile. `list.num` is a multiple of `num_pieces`.
void copy_checked(const Fragments& list, std::size_t num_pieces, std::size_t num_bytes,
                  std::uint32_t* checksum);

}  // namespace kvtier::copy
