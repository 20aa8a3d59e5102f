// Types of the block trie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/promise.hpp"

namespace kvtier::trie {

// A node's place in the arena. It is used again after the node is freed.
using Index = std::uint32_t;
inline constexpr Index kNone = 0xFFFF'FFFF;

// A caller's handle of a block: generation << 32 | index. A freed node begins a new generation, so
// the number of a block is never reused.
using BlockId = std::uint64_t;

using Slot = std::uint32_t;

inline constexpr std::size_t kMaxColumns = 32;

// The values of kvtier.index.State.
enum class State : std::uint8_t { absent = 1, writing = 2, ready = 3, evicting = 4 };

inline const char* name(State state) {
  constexpr const char* kNames[] = {"?", "ABSENT", "WRITING", "READY", "EVICTING"};
  return kNames[static_cast<std::size_t>(state)];
}

inline bool may_move(State from, State to) {
  switch (from) {
    case State::absent:
      return to == State::writing;
    case State::writing:
      return to == State::ready || to == State::absent;
    case State::ready:
      return to == State::evicting;
    case State::evicting:
      return to == State::ready || to == State::absent;
  }
  return false;
}

// The bytes that name a block under its parent, kMaxLabelBytes at most. Not owned.
struct Label {
  const std::byte* data;
  std::size_t size;
};
inline constexpr std::size_t kMaxLabelBytes = 0xFFFF'FFFF;

// A caller named a block that the index does not know (any more).
class UnknownBlock : public std::out_of_range {
 public:
  explicit UnknownBlock(BlockId block) : std::out_of_range("unknown block"), block(block) {}
  BlockId block;
};

}  // namespace kvtier::trie
