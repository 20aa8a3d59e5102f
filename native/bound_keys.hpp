// What blocks are called outside of the process: lists of Python, and the keys that the trie keeps.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "bound_values.hpp"
#include "trie/block_trie.hpp"

namespace kvtier::bound {

inline nb::object bytes(trie::Label label) { return nb::bytes(label.data, label.size); }

// (namespace, depth, key or None) of each block: three lists.
inline nb::object names_of(const trie::BlockTrie& trie, const std::vector<trie::BlockId>& blocks) {
  return checked([&] {
    trie::Label last{nullptr, 0};
    nb::object space;
    nb::object spaces = list_of(blocks, [&](trie::BlockId block) {
      const trie::Label from = trie.origin(block).space;
      if (from.data != last.data || !space.is_valid()) space = bytes(last = from);
      return space;
    });
    nb::object depths =
        list_of(blocks, [&](trie::BlockId block) { return number(trie.origin(block).depth); });
    nb::object keys = list_of(blocks, [&](trie::BlockId block) -> nb::object {
      const trie::BlockTrie::Key* const key = trie.known_key(block);
      if (key == nullptr) return nb::none();
      return bytes({key->data(), key->size()});
    });
    return nb::make_tuple(spaces, depths, keys);
  });
}

// (the key before them, blocks, labels): what has no key yet, up to `block`.
inline nb::object missing_keys_of(const trie::BlockTrie& trie, trie::BlockId block) {
  std::vector<trie::BlockTrie::Unnamed> missing;
  const std::string_view before = checked([&] { return trie.missing_keys(block, missing); });
  return nb::make_tuple(nb::bytes(before.data(), before.size()),
                        list_of(missing, [](const auto& each) { return number(each.block); }),
                        list_of(missing, [](const auto& each) { return bytes(each.label); }));
}

inline void set_keys(trie::BlockTrie& trie, const std::vector<trie::BlockId>& blocks,
                     const Items& keys) {
  if (keys.size() != blocks.size()) fail(PyExc_ValueError, "a key for each block");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::string_view text = to_bytes(keys[i], "a key");
    trie::BlockTrie::Key key;
    if (text.size() != key.size()) fail(PyExc_ValueError, "a key has %zu bytes", key.size());
    std::memcpy(key.data(), text.data(), key.size());
    checked([&] { trie.set_key(blocks[i], key); });
  }
}

}  // namespace kvtier::bound
