// The messages of kvtier.node.wire.protocol that most calls consist of, in MessagePack.
#pragma once

#include <array>
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

struct ReserveRequest {
  std::uint64_t id;
  std::uint64_t room;
  Bytes keys;
};

struct CommitNotice {
  std::uint64_t room;
  Bytes slots;
  Bytes depths;
  bool to_storage;
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

inline std::optional<ReserveRequest> read_reserve(Bytes content) {
  Reader reader(content);
  if (reader.array() != 4 || reader.text() != "ReserveRequest") return std::nullopt;
  const auto id = reader.number();
  const auto room = reader.number();
  const auto keys = reader.bytes();
  if (!id || !room || !keys || !reader.is_at_end()) return std::nullopt;
  return ReserveRequest{*id, *room, *keys};
}

inline std::optional<CommitNotice> read_commit(Bytes content) {
  Reader reader(content);
  if (reader.array() != 5 || reader.text() != "CommitNotice") return std::nullopt;
  const auto room = reader.number();
  const auto slots = reader.bytes();
  const auto depths = reader.bytes();
  const auto to_storage = reader.truth();
  if (!room || !slots || !depths || !to_storage || !reader.is_at_end()) return std::nullopt;
  return CommitNotice{*room, *slots, *depths, *to_storage};
}

// The frame of an answer: its name, the request's number, four fields of bytes, and possibly a 0.
class Answer {
 public:
  Answer(std::string_view name, std::uint64_t id, const std::array<std::size_t, 4>& sizes,
         bool ends_with_zero)
      : name_(name), id_(id), sizes_(sizes), ends_with_zero_(ends_with_zero) {}

  std::size_t num_bytes() const {
    std::size_t sum = kHeader + 1 + 1 + name_.size() + 9 + (ends_with_zero_ ? 1 : 0);
    for (const std::size_t size : sizes_) sum += 5 + size;
    return sum;
  }

  // Returns the beginnings of the fields of bytes, which the caller fills.
  std::array<std::byte*, 4> write(std::byte* frame) const {
    std::byte* at = frame;
    for (unsigned shift = 0; shift < 32; shift += 8) put(at, (num_bytes() - kHeader) >> shift);
    put(at, 0x90 | (2 + sizes_.size() + (ends_with_zero_ ? 1 : 0)));
    put(at, 0xA0 | name_.size());
    std::memcpy(at, name_.data(), name_.size());
    at += name_.size();
    put(at, 0xCF);
    for (unsigned shift = 64; shift > 0; shift -= 8) put(at, id_ >> (shift - 8));
    std::array<std::byte*, 4> fields{};
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      put(at, 0xC6);
      for (unsigned shift = 32; shift > 0; shift -= 8) put(at, sizes_[i] >> (shift - 8));
      fields[i] = at;
      at += sizes_[i];
    }
    if (ends_with_zero_) put(at, 0);
    return fields;
  }

 private:
  static constexpr std::size_t kHeader = 4;

  static void put(std::byte*& at, std::uint64_t value) {
    *at++ = static_cast<std::byte>(value & 0xFF);
  }

  std::string_view name_;
  std::uint64_t id_;
  std::array<std::size_t, 4> sizes_;
  bool ends_with_zero_;
};

}  // namespace kvtier::node
