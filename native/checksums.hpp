// Checksums, as they are given to Python.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

namespace kvtier {

using Checksums = nanobind::ndarray<nanobind::numpy, std::uint32_t, nanobind::ndim<1>>;

// An array that owns `values`.
inline Checksums owned(std::unique_ptr<std::uint32_t[]> values, std::size_t num) {
  std::uint32_t* const data = values.get();
  const nanobind::capsule owner(
      data, [](void* memory) noexcept { delete[] static_cast<std::uint32_t*>(memory); });
  values.release();
  return Checksums(data, {num}, owner);
}

}  // namespace kvtier
