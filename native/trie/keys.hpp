// The keys of blocks, by place: 36 bytes each, from the first one on that is known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/pages.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

using Key = std::array<std::byte, 32>;

// Blocks of a path lie beside each other, and so do their keys. A key is stored with the generation
// of its block, so it is invalid by itself when the place is reused.
class Keys {
 public:
  // Return a key, whose address never changes; null if it is unknown.
  const Key* find(Index index, std::uint32_t generation) const {
    const std::size_t chunk = index >> kBits;
    if (chunk >= chunks_.size() || !chunks_[chunk]) return nullptr;
    const Entry& entry = chunks_[chunk][index & (kEntries - 1)];
    return entry.stamp == generation + 1 ? &entry.key : nullptr;
  }

  void set(Index index, std::uint32_t generation, const Key& key) {
    const std::size_t chunk = index >> kBits;
    if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
    if (!chunks_[chunk]) {
      chunks_[chunk] = allocate_pages<Entry>(kEntries);
      std::memset(static_cast<void*>(chunks_[chunk].get()), 0, kEntries * sizeof(Entry));
      ++num_chunks_;
    }
    chunks_[chunk][index & (kEntries - 1)] = {generation + 1, key};
  }

  std::size_t num_bytes() const { return num_chunks_ * kEntries * sizeof(Entry); }

 private:
  static constexpr std::size_t kBits = 10;
  static constexpr std::size_t kEntries = std::size_t{1} << kBits;

  struct Entry {
    std::uint32_t stamp;  // one more than the generation, 0 for no key
    Key key;
  };

  std::vector<Pages<Entry>> chunks_;
  std::size_t num_chunks_ = 0;
};

}  // namespace kvtier::trie
