// Binding of token ids, and of the keys that follow from them.
#include <cstring>
#include <vector>

#include "bind.hpp"
#include "blake3/blake3.hpp"
#include "bound_labels.hpp"
#include "bound_values.hpp"
#include "trie/tokens.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

using namespace bound;

std::byte* bytes_of(const nb::object& packed) {
  return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(packed.ptr()));
}

nb::object pack_tokens(nb::handle tokens) {
  constexpr std::size_t kItem = sizeof(std::uint32_t);
  if (PyList_CheckExact(tokens.ptr()) || PyTuple_CheckExact(tokens.ptr())) {
    const Items items(tokens, "tokens");
    nb::object packed =
        owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(items.size() * kItem)));
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (!PyLong_CheckExact(items[i])) return nb::none();
      int overflow = 0;
      const long long id = PyLong_AsLongLongAndOverflow(items[i], &overflow);
      if (overflow != 0 || id < 0 || id > 0xFFFF'FFFF) return nb::none();
      const auto word = static_cast<std::uint32_t>(id);
      std::memcpy(bytes_of(packed) + i * kItem, &word, kItem);
    }
    return packed;
  }
  const TokenArray ids(tokens);
  if (!ids.is_integer()) return nb::none();
  nb::object packed =
      owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(ids.size() * kItem)));
  const bool fits = trie::pack_tokens(ids.data(), ids.type(), ids.size(), bytes_of(packed));
  return fits ? packed : nb::none();
}

// Whatever has a `spec` is read as Labels are: from its tokens, and not label by label.
nb::object chain_keys(nb::handle previous, nb::handle labels) {
  const std::string_view before = to_bytes(previous.ptr(), "a key");
  const bool is_buffer = PyObject_HasAttrString(labels.ptr(), "spec");
  LabelReader reader(is_buffer ? labels.type() : nb::handle(Py_None));
  std::vector<blake3::Hash> keys;
  bool fits = true;
  reader.read(labels, [&](trie::Labels& path) {
    std::array<std::byte, blake3::kChunkBytes> text;
    const auto* key = reinterpret_cast<const std::byte*>(before.data());
    std::size_t key_bytes = before.size();
    keys.reserve(path.size());
    for (std::size_t i = 0; fits && i < path.size(); ++i) {
      const trie::Label label = path[i];
      fits = key_bytes <= text.size() && label.size <= text.size() - key_bytes;
      if (!fits) return;
      if (key_bytes > 0) std::memcpy(text.data(), key, key_bytes);
      if (label.size > 0) std::memcpy(text.data() + key_bytes, label.data, label.size);
      keys.push_back(blake3::hash({text.data(), key_bytes + label.size}));
      key = keys.back().data();
      key_bytes = keys.back().size();
    }
  });
  if (!fits) return nb::none();
  return list_of(keys, [](const blake3::Hash& key) { return nb::bytes(key.data(), key.size()); });
}

}  // namespace

void bind_tokens(nb::module_& module) {
  module.def("pack_tokens", &pack_tokens, nb::arg("tokens").none(),
             nb::sig("def pack_tokens(tokens: object) -> bytes | None"),
             "Token ids as little-endian uint32.");
  module.def("chain_keys", &chain_keys, nb::arg("previous"), nb::arg("labels"),
             nb::sig("def chain_keys(previous: bytes, labels: Iterable[bytes]) "
                     "-> list[bytes] | None"),
             "Keys of blocks below each other.");
}

}  // namespace kvtier
