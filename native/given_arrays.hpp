// Arrays of numbers, as they are given to Python.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

namespace kvtier {

template <typename Number>
using GivenArray = nanobind::ndarray<nanobind::numpy, Number, nanobind::ndim<1>>;
using Checksums = GivenArray<std::uint32_t>;

// An array that owns `values`.
template <typename Number>
GivenArray<Number> owned(std::unique_ptr<Number[]> values, std::size_t num) {
  Number* const data = values.get();
  const nanobind::capsule owner(
      data, [](void* memory) noexcept { delete[] static_cast<Number*>(memory); });
  values.release();
  return GivenArray<Number>(data, {num}, owner);
}

}  // namespace kvtier
