// Binding of the block trie.
#include "bound_trie.hpp"

namespace nb = nanobind;

namespace kvtier {

using bound::BlockTrie;

void bind_trie(nb::module_& module) {
  nb::class_<BlockTrie> type(module, "BlockTrie", "What is cached, where: see kvtier.index.");
  bound::bind_blocks(type);
  type.def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::handle, nb::handle>(), nb::arg("tiers"),
           nb::arg("policies"), nb::arg("states"), nb::arg("labels_type"), nb::arg("match_type"))
      .def("match", &BlockTrie::match, nb::arg("namespace"), nb::arg("labels"), nb::lock_self())
      .def("match_slots", &BlockTrie::match_slots, nb::arg("namespace"), nb::arg("labels"),
           nb::arg("tier"), nb::lock_self())
      .def("state", &BlockTrie::state, nb::arg("block"), nb::arg("tier"), nb::lock_self())
      .def("states", &BlockTrie::states, nb::arg("namespace"), nb::arg("labels"), nb::arg("tier"),
           nb::arg("after").none(), nb::lock_self())
      .def("prefixes", &BlockTrie::prefixes, nb::arg("blocks"), nb::arg("tier"), nb::lock_self())
      .def("num_namespaces", &BlockTrie::num_namespaces, nb::lock_self())
      .def("extend", &BlockTrie::extend, nb::arg("namespace"), nb::arg("labels"),
           nb::arg("after").none(), nb::lock_self())
      .def("insert", &BlockTrie::insert, nb::arg("namespace"), nb::arg("labels"), nb::arg("tier"),
           nb::arg("slots"), nb::arg("now"), nb::arg("after").none(), nb::arg("hold"),
           nb::lock_self())
      .def("asked", &BlockTrie::asked, nb::arg("namespace"), nb::arg("labels"), nb::arg("now"),
           nb::lock_self())
      .def("used_state", &BlockTrie::used_state, nb::arg("namespace"), nb::arg("labels"),
           nb::arg("num_before"), nb::arg("front"), nb::arg("at_end"), nb::arg("now"),
           nb::lock_self())
      .def("retain", &BlockTrie::retain, nb::arg("namespace"), nb::arg("labels"),
           nb::arg("block_hint"), nb::arg("now"), nb::lock_self())
      .def("admit", &BlockTrie::admit, nb::arg("blocks"), nb::arg("tier"), nb::arg("num_free"),
           nb::arg("least_chance"), nb::lock_self())
      .def("commit", &BlockTrie::commit, nb::arg("blocks"), nb::arg("tier"), nb::arg("now"),
           nb::lock_self())
      .def("touch", &BlockTrie::touch, nb::arg("blocks"), nb::arg("now"), nb::lock_self())
      .def("drop", &BlockTrie::drop, nb::arg("tier"), nb::arg("num_blocks"), nb::lock_self())
      .def("origin", &BlockTrie::origin, nb::arg("block"), nb::lock_self())
      .def("names", &BlockTrie::names, nb::arg("blocks"), nb::lock_self())
      .def("missing_keys", &BlockTrie::missing_keys, nb::arg("block"), nb::lock_self())
      .def("set_keys", &BlockTrie::set_keys, nb::arg("blocks"), nb::arg("keys"), nb::lock_self())
      .def("dump", &BlockTrie::dump, nb::lock_self());
}

}  // namespace kvtier
