// What blocks are called outside of the process: lists of Python, and the keys that the trie keeps.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "packed.hpp"
#include "trie/block_trie.hpp"

namespace kvtier::bound {

inline nb::object bytes(trie::Label label) { return nb::bytes(label.data, label.size); }

// (namespace of each, depths, keys, whether there is a key for each). One without has zeros.
inline nb::object names_of(const trie::BlockTrie& trie, const std::vector<trie::BlockId>& blocks) {
  return checked([&] {
    trie::Label last{nullptr, 0};
    nb::object space;
    Numbers depths(blocks.size());
    Keys keys(blocks.size());
    std::size_t i = 0;
    bool are_all_known = true;
    nb::object spaces = list_of(blocks, [&](trie::BlockId block) {
      const auto [from, depth] = trie.origin(block);
      if (from.data != last.data || !space.is_valid()) space = bytes(last = from);
      const trie::Key* const key = trie.known_key(block);
      are_all_known &= key != nullptr;
      depths.data()[i] = depth;
      keys.data()[i++] = key == nullptr ? trie::Key{} : *key;
      return space;
    });
    return nb::make_tuple(spaces, std::move(depths).given(), std::move(keys).given(),
                          are_all_known);
  });
}

// (the key before them, blocks, labels): what has no key yet, up to `block`.
inline nb::object missing_keys_of(const trie::BlockTrie& trie, trie::BlockId block) {
  std::vector<trie::BlockTrie::Unnamed> missing;
  const std::string_view before = checked([&] { return trie.missing_keys(block, missing); });
  return nb::make_tuple(nb::bytes(before.data(), before.size()),
                        numbers_of(missing, [](const auto& each) { return each.block; }),
                        list_of(missing, [](const auto& each) { return bytes(each.label); }));
}

inline void set_keys(trie::BlockTrie& trie, const std::vector<trie::BlockId>& blocks,
                     const Keys& keys) {
  if (keys.size() != blocks.size()) fail(PyExc_ValueError, "a key for each block");
  checked([&] {
    for (std::size_t i = 0; i < keys.size(); ++i) trie.set_key(blocks[i], keys.data()[i]);
  });
}

}  // namespace kvtier::bound
