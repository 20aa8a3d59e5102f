// Bindings of codes of one byte. Arguments are checked here and trusted inside.
#include <cstdint>
#include <optional>
#include <string_view>

#include "arrays.hpp"
#include "bind.hpp"
#include "quantize/quantize.hpp"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr std::uint64_t kScaleBytes = 2;
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 40;

std::optional<quantize::Type> type_named(std::string_view name) {
  if (name == "float32") return quantize::Type::float32;
  if (name == "float16") return quantize::Type::float16;
  if (name == "bfloat16") return quantize::Type::bfloat16;
  return std::nullopt;
}

std::optional<quantize::Code> code_named(std::string_view name) {
  if (name == "fp8") return quantize::Code::e4m3;
  if (name == "int8") return quantize::Code::int8;
  return std::nullopt;
}

quantize::Shape checked_shape(std::uint64_t address, std::uint64_t num_tokens,
                              std::uint64_t num_channels, nb::str type, nb::str code,
                              std::uint64_t scales, std::uint64_t codes) {
  const std::optional<quantize::Type> its_type = type_named(type.c_str());
  if (!its_type) fail(PyExc_ValueError, "type must be float32, float16 or bfloat16");
  const std::optional<quantize::Code> its_code = code_named(code.c_str());
  if (!its_code) fail(PyExc_ValueError, "code must be fp8 or int8");
  if (num_tokens > kMaxElements || num_channels > kMaxElements ||
      (num_channels > 0 && num_tokens > kMaxElements / num_channels))
    fail(PyExc_ValueError, "%llu tokens of %llu channels are too many",
         static_cast<unsigned long long>(num_tokens),
         static_cast<unsigned long long>(num_channels));
  const std::uint64_t num_elements = num_tokens * num_channels;
  check_memory("address", address, num_elements * quantize::bytes_of(*its_type));
  check_memory("scales", scales, kScaleBytes * num_channels);
  check_memory("codes", codes, num_elements);
  return {static_cast<std::size_t>(num_tokens), static_cast<std::size_t>(num_channels), *its_type,
          *its_code};
}

bool quantize_channels(std::uint64_t address, std::uint64_t num_tokens, std::uint64_t num_channels,
                       nb::str type, nb::str code, std::uint64_t scales, std::uint64_t codes) {
  const quantize::Shape shape =
      checked_shape(address, num_tokens, num_channels, type, code, scales, codes);
  const nb::gil_scoped_release others_may_run;
  return quantize::encode(bytes_at(address), shape, bytes_at(scales), bytes_at(codes));
}

bool restore_channels(std::uint64_t address, std::uint64_t num_tokens, std::uint64_t num_channels,
                      nb::str type, nb::str code, std::uint64_t scales, std::uint64_t codes) {
  const quantize::Shape shape =
      checked_shape(address, num_tokens, num_channels, type, code, scales, codes);
  const nb::gil_scoped_release others_may_run;
  return quantize::decode(bytes_at(address), shape, bytes_at(scales), bytes_at(codes));
}

}  // namespace

void bind_quantize(nb::module_& module) {
  module.def("quantize_channels", &quantize_channels, nb::arg("address"), nb::arg("num_tokens"),
             nb::arg("num_channels"), nb::arg("type"), nb::arg("code"), nb::arg("scales"),
             nb::arg("codes"),
             nb::sig("def quantize_channels(address: int, num_tokens: int, num_channels: int, "
                     "type: str, code: str, scales: int, codes: int) -> bool"),
             "Write scales and codes of numbers; whether all were finite.");
  module.def("restore_channels", &restore_channels, nb::arg("address"), nb::arg("num_tokens"),
             nb::arg("num_channels"), nb::arg("type"), nb::arg("code"), nb::arg("scales"),
             nb::arg("codes"),
             nb::sig("def restore_channels(address: int, num_tokens: int, num_channels: int, "
                     "type: str, code: str, scales: int, codes: int) -> bool"),
             "Write the numbers of codes; whether all codes and scales are ones that are written.");
}

}  // namespace kvtier
