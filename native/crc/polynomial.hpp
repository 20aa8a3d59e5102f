// Arithmetic with crc32c's polynomial, at compile time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier::crc {

// x^32 + ... modulo which everything is reckoned; bit 31 is x^0, as in every reflected CRC.
inline constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t result = 1u << 31;  // x^0
  std::uint32_t square = 1u << 30;  // x^1
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

// kSteps[i][b]: what byte b does to a state, followed by i zero bytes.
using Steps = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Steps make_steps() {
  Steps steps{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    steps[0][byte] = state;
  }
  for (std::size_t i = 1; i < 8; ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = steps[i - 1][byte];
      steps[i][byte] = (before >> 8) ^ steps[0][before & 0xFF];
    }
  }
  return steps;
}

inline constexpr Steps kSteps = make_steps();

}  // namespace kvtier::crc
