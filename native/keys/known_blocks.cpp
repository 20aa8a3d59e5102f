#include "keys/known_blocks.hpp"

#include <random>
#include <stdexcept>
#include <string>

namespace kvtier::keys {

namespace {

constexpr std::size_t kMaxKeyBytes = 256;

std::uint64_t random_seed() {
  std::random_device random;
  const std::uint64_t high = random();
  return high << 32 | random();
}

}  // namespace

KnownBlocks::KnownBlocks(const std::vector<bool>& have_links, std::size_t group_bytes)
    : group_bytes_(group_bytes), seed_(random_seed()), rows_(have_links) {}

void KnownBlocks::expect(std::size_t num_blocks) {
  cells_.reserve(num_blocks, 0.25, name_of_row());  // free cells make searches short
  rows_.reserve(num_blocks);
}

void KnownBlocks::check_key(Key key, Key first) const {
  if (key.size == 0 || key.size > kMaxKeyBytes)
    throw std::invalid_argument("a key has 1 to 256 bytes, not " + std::to_string(key.size));
  const std::size_t num_bytes = rows_.key_bytes() > 0 ? rows_.key_bytes() : first.size;
  if (key.size != num_bytes)
    throw std::invalid_argument("a key has " + std::to_string(key.size) +
                                " bytes, those before it " + std::to_string(num_bytes));
}

void KnownBlocks::drop(Index row) {
  cells_.erase(name(row), [row](Index other) { return other == row; }, name_of_row());
  rows_.free(row);
}

void KnownBlocks::check() const {
  for (Index row = 0; row < rows_.end(); ++row)
    promise(!rows_.is_live(row) || find_row(name(row), key(row)) == row,
            "a block that is not found by its key");
}

}  // namespace kvtier::keys
