// Binding of token ids.
#include <cstring>

#include "bind.hpp"
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
    const bound::Items items(tokens, "tokens");
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

}  // namespace

void bind_tokens(nb::module_& module) {
  module.def("pack_tokens", &pack_tokens, nb::arg("tokens").none(),
             nb::sig("def pack_tokens(tokens: object) -> bytes | None"),
             "Token ids as little-endian uint32.");
}

}  // namespace kvtier
