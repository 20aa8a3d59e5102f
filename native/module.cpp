// The extension module kvtier._native.
#include "bind.hpp"
#include "errors.hpp"

NB_MODULE(_native, module) {
#if !defined(KVTIER_SANITIZED)
  // A child that is forked while a thread of its parent holds an index can never free it. That is
  // no leak to report to users; only tests under sanitizers report it.
  nanobind::set_leak_warnings(false);
#endif
  module.doc() = "The native core of kvtier. Use it through kvtier.core.hot.";
  nanobind::exception<kvtier::NativeError>(module, "NativeError", PyExc_RuntimeError);
  kvtier::bind_copy(module);
  kvtier::bind_crc(module);
  kvtier::bind_key_index(module);
  kvtier::bind_keys(module);
  kvtier::bind_net(module);
  kvtier::bind_packed(module);
  kvtier::bind_planes(module);
  kvtier::bind_policy(module);
  kvtier::bind_quantize(module);
  kvtier::bind_slots(module);
  kvtier::bind_tokens(module);
  kvtier::bind_trie(module);
  kvtier::bind_uring(module);
}
