// The messages of kvtier.node.wire.protocol that most calls consist of, in MessagePack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

namespace kvtier::node {

using Bytes = std::span<const std::byte>;

// Reads one value after the other. A value of another kind than requested, or one that is cut off,
// reads as nothing; so do all that follow.
class Reader {
 public:
  explicit Reader(Bytes content) : left_(content) {}

  bool is_at_end() const { return left_.empty(); }

  std::optional<std::size_t> array() {
    const std::optional<unsigned> kind = take();
    if (!kind || (*kind & 0xF0) != 0x90) return std::nullopt;
    return *kind & 0x0F;
  }
  std::optional<std::string_view> text() {
    const std::optional<unsigned> kind = take();
    if (!kind || (*kind & 0xE0) != 0xA0) return std::nullopt;
    const std::optional<Bytes> found = take_bytes(*kind & 0x1F);
    if (!found) return std::nullopt;
    return std::string_view{reinterpret_cast<const char*>(found->data()), found->size()};
  }
  // Below 2**64, and not negative.
  std::optional<std::uint64_t> number() {
    const std::optional<unsigned> kind = take();
    if (!kind) return std::nullopt;
    if (*kind < 0x80) return *kind;
    if (*kind < 0xCC || *kind > 0xCF) return std::nullopt;
    return big_endian(std::size_t{1} << (*kind - 0xCC));
  }
  std::optional<bool> truth() {
    const std::optional<unsigned> kind = take();
    if (!kind || (*kind != 0xC2 && *kind != 0xC3)) return std::nullopt;
    return *kind == 0xC3;
  }
  std::optional<Bytes> bytes() {
    const std::optional<unsigned> kind = take();
    if (!kind || *kind < 0xC4 || *kind > 0xC6) return std::nullopt;
    const std::optional<std::uint64_t> size = big_endian(std::size_t{1} << (*kind - 0xC4));
    if (!size) return std::nullopt;
    return take_bytes(*size);
  }

 private:
  std::optional<unsigned> take() {
    const std::optional<Bytes> found = take_bytes(1);
    if (!found) return std::nullopt;
    return std::to_integer<unsigned>((*found)[0]);
  }
  std::optional<Bytes> take_bytes(std::uint64_t num) {
    if (num > left_.size()) {
      left_ = {};
      return std::nullopt;
    }
    const Bytes found = left_.first(num);
    left_ = left_.subspan(num);
    return found;
  }
  std::optional<std::uint64_t> big_endian(std::size_t num) {
    const std::optional<Bytes> found = take_bytes(num);
    if (!found) return std::nullopt;
    std::uint64_t value = 0;
    for (const std::byte each : *found) value = value << 8 | std::to_integer<std::uint64_t>(each);
    return value;
  }

  Bytes left_;
};

struct LookupRequest {
  std::uint64_t id;
  std::uint64_t room;
  Bytes keys;
  bool counts;
};

struct ReleaseNotice {
  std::uint64_t room;
  Bytes slots;
};

// Nothing for other messages, and for those with fields that this version does not know.
inline std::optional<LookupRequest> read_lookup(Bytes content) {
  Reader reader(content);
  if (reader.array() != 6 || reader.text() != "LookupRequest") return std::nullopt;
  const auto id = reader.number();
  const auto room = reader.number();
  const auto keys = reader.bytes();
  const auto has_gaps = reader.truth();
  const auto counts = reader.truth();
  if (!id || !room || !keys || !has_gaps || !counts || !reader.is_at_end()) return std::nullopt;
  return LookupRequest{*id, *room, *keys, *counts};
}

inline std::optional<ReleaseNotice> read_release(Bytes content) {
  Reader reader(content);
  if (reader.array() != 3 || reader.text() != "ReleaseNotice") return std::nullopt;
  const auto room = reader.number();
  const auto slots = reader.bytes();
  if (!room || !slots || !reader.is_at_end()) return std::nullopt;
  return ReleaseNotice{*room, *slots};
}

// The frame of an answer to a look-up of `num_keys` blocks, `num_slots` of which are in memory, and
// none of which is in storage.
class LookupAnswer {
 public:
  LookupAnswer(std::uint64_t id, std::size_t num_keys, std::size_t num_slots)
      : id_(id), num_keys_(num_keys), num_slots_(num_slots) {}

  std::size_t num_bytes() const {
    return kHeader + kHead + 2 * (kBin + num_keys_) + 2 * (kBin + 8 * num_slots_) + 1;
  }

  // Parts of the frame that the caller fills.
  struct Parts {
    std::byte* places;
    std::byte* slots;
    std::byte* generations;
  };
  Parts write(std::byte* frame) const {
    std::byte* at = frame;
    for (unsigned shift = 0; shift < 32; shift += 8) put(at, (num_bytes() - kHeader) >> shift);
    put(at, 0x97);
    put(at, 0xA0 | kTag.size());
    std::memcpy(at, kTag.data(), kTag.size());
    at += kTag.size();
    put(at, 0xCF);
    for (unsigned shift = 64; shift > 0; shift -= 8) put(at, id_ >> (shift - 8));
    Parts parts{};
    parts.places = begin_bytes(at, num_keys_);
    parts.slots = begin_bytes(at, 8 * num_slots_);
    parts.generations = begin_bytes(at, 8 * num_slots_);
    std::memset(begin_bytes(at, num_keys_), 0, num_keys_);  // each would be read from memory
    put(at, 0);                                             // nothing is pending
    return parts;
  }

 private:
  static constexpr std::string_view kTag = "LookupAnswer";
  static constexpr std::size_t kHeader = 4;
  static constexpr std::size_t kHead = 1 + 1 + kTag.size() + 9;
  static constexpr std::size_t kBin = 5;

  static void put(std::byte*& at, std::uint64_t value) {
    *at++ = static_cast<std::byte>(value & 0xFF);
  }
  static std::byte* begin_bytes(std::byte*& at, std::size_t size) {
    put(at, 0xC6);
    for (unsigned shift = 32; shift > 0; shift -= 8) put(at, size >> (shift - 8));
    std::byte* const begin = at;
    at += size;
    return begin;
  }

  std::uint64_t id_;
  std::size_t num_keys_;
  std::size_t num_slots_;
};

}  // namespace kvtier::node
