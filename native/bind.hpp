// One function per area adds that area's bindings to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void bind_copy(nanobind::module_& module);
void bind_crc(nanobind::module_& module);
void bind_key_index(nanobind::module_& module);
void bind_keys(nanobind::module_& module);
void bind_net(nanobind::module_& module);
void bind_packed(nanobind::module_& module);
void bind_planes(nanobind::module_& module);
void bind_policy(nanobind::module_& module);
void bind_quantize(nanobind::module_& module);
void bind_slots(nanobind::module_& module);
void bind_tokens(nanobind::module_& module);
void bind_trie(nanobind::module_& module);
void bind_uring(nanobind::module_& module);

}  // namespace kvtier
