// The inner loop of a look-up, for blocks of a path that lie in prompt order.
#include <cstring>

#include "trie/nodes.hpp"

#if defined(__x86_64__)
#define KVTIER_AVX2 1
#endif

namespace kvtier::trie {

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kIdsAhead = 1024;  // bytes; beyond the last id it does no harm
constexpr std::size_t kLanes = 8;
using Ids32 [[gnu::vector_size(kLanes * 4)]] = std::uint32_t;
using Ids64 [[gnu::vector_size(kLanes * 4)]] = std::uint64_t;  // half as many
using Known [[gnu::vector_size(kLanes * 2)]] = std::uint32_t;

// By reference: how a vector is passed depends on the instructions that may be used.
template <typename Value>
[[gnu::always_inline]] inline void load(Value& value, const std::byte* from) {
  std::memcpy(&value, from, sizeof(value));
}

template <typename Vector>
[[gnu::always_inline]] inline bool is_zero(const Vector& vector) {
  std::uint64_t words[sizeof(Vector) / 8];
  std::memcpy(words, &vector, sizeof(vector));
  return (words[0] | words[1] | words[2] | words[3]) == 0;
}

// Whether `num` ids, in the caller's type, equal those in `known`.
template <IdType type>
[[gnu::always_inline]] inline bool same(const std::byte* ids, std::size_t num,
                                        const std::byte* known) {
  if constexpr (type == IdType::int64) {
    Ids64 differ{}, from;
    Known label;
    for (; num >= kLanes / 2; num -= kLanes / 2, ids += sizeof(from), known += sizeof(label)) {
      load(from, ids);
      load(label, known);
      differ |= from ^ __builtin_convertvector(label, Ids64);
    }
    std::uint64_t rest = 0, id;
    std::uint32_t one;
    for (; num > 0; --num, ids += sizeof(id), known += sizeof(one)) {
      load(id, ids);
      load(one, known);
      rest |= id ^ one;
    }
    return rest == 0 && is_zero(differ);
  } else {
    constexpr std::uint32_t kRefused = type == IdType::int32 ? 0x8000'0000 : 0;  // below zero
    Ids32 differ{}, from, label;
    for (; num >= kLanes; num -= kLanes, ids += sizeof(from), known += sizeof(label)) {
      load(from, ids);
      load(label, known);
      differ |= (from ^ label) | (from & kRefused);
    }
    std::uint32_t rest = 0, id, one;
    for (; num > 0; --num, ids += sizeof(id), known += sizeof(one)) {
      load(id, ids);
      load(one, known);
      rest |= (id ^ one) | (id & kRefused);
    }
    return rest == 0 && is_zero(differ);
  }
}

template <IdType type>
[[gnu::always_inline]] inline std::size_t follow_as(const Nodes& nodes, Index above,
                                                    const Labels::Run& run) {
  const std::size_t num_tokens = run.tokens_per_block;
  const std::byte* ids = run.ids;
  std::size_t num = 0;
  // Where the next block lies does not depend on what is read of this one: the processor need not
  // wait for memory to go on.
  for (; num < run.num_blocks && above + 1 < nodes.end(); ++num, ++above) {
    // Ids are read faster than the processor fetches them by itself.
    for (std::size_t at = 0; at < id_bytes(type) * num_tokens; at += kLine)
      __builtin_prefetch(ids + kIdsAhead + at);
    if (nodes[above + 1].parent != above || nodes[above].num_children != 1) break;
    const Label known = nodes.label(above + 1);
    if (known.size != num_tokens * 4 || !same<type>(ids, num_tokens, known.data)) break;
    ids += num_tokens * id_bytes(type);
  }
  return num;
}

[[gnu::always_inline]] inline std::size_t follow_any(const Nodes& nodes, Index above,
                                                     const Labels::Run& run) {
  switch (run.type) {
    case IdType::uint32:
      return follow_as<IdType::uint32>(nodes, above, run);
    case IdType::int32:
      return follow_as<IdType::int32>(nodes, above, run);
    case IdType::int64:
      return follow_as<IdType::int64>(nodes, above, run);
  }
  return 0;
}

std::size_t follow_plain(const Nodes& nodes, Index above, const Labels::Run& run) {
  return follow_any(nodes, above, run);
}

#if KVTIER_AVX2
[[gnu::target("avx2")]] std::size_t follow_avx2(const Nodes& nodes, Index above,
                                                const Labels::Run& run) {
  return follow_any(nodes, above, run);
}
#endif

auto* best_follow() {
#if KVTIER_AVX2
  if (__builtin_cpu_supports("avx2")) return follow_avx2;
#endif
  return follow_plain;
}

}  // namespace

std::size_t Nodes::follow(Index above, const Labels::Run& run) const {
  static auto* const best = best_follow();
  return best(*this, above, run);
}

}  // namespace kvtier::trie
