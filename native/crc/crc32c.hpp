// crc32c: the checksum of blocks, journal records and superblocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::crc {

// The checksum of `num_bytes` at `data`, continued from `seed`, the checksum of the bytes before
// them (0 for none). CRC-32 by Castagnoli's polynomial, bits reflected, inverted before and after.
// Uses the processor's instruction where it has one.
std::uint32_t crc32c(const std::byte* data, std::size_t num_bytes, std::uint32_t seed = 0);

// The same, for who reads on elsewhere: meanwhile the lines at `ahead`, as many, come into the cache.
// They need not be there; null for none. Whole steps are fastest.
std::uint32_t crc32c_step(const std::byte* data, std::size_t num_bytes, std::uint32_t seed,
                          const std::byte* ahead);
inline constexpr std::size_t kStepBytes = 3 * 2048;

// The same by tables: what runs where there is no instruction.
std::uint32_t crc32c_table(const std::byte* data, std::size_t num_bytes, std::uint32_t seed = 0);

// "sse4.2", "armv8" or "table": what `crc32c` uses here.
const char* crc32c_kind();

// Checksums of pieces of memory: result[i] of size[i] bytes at address[i], on up to `num_threads`
// threads.
void crc32c_many(const std::uint64_t* address, const std::uint64_t* size, std::size_t num,
                 std::size_t num_threads, std::uint32_t* result);

// Checksums of rows: result[i] of `width` bytes at first + i * stride.
void crc32c_rows(const std::byte* first, std::size_t num, std::size_t width, std::ptrdiff_t stride,
                 std::uint32_t* result);

}  // namespace kvtier::crc
