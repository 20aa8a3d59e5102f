// Memory in whole pages.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvtier {

struct FreePages {
  void operator()(void* memory) const { std::free(memory); }
};

template <typename Item>
using Pages = std::unique_ptr<Item[], FreePages>;

// Allocates `num` uninitialised items. All pages are faulted in at once: while an index grows, one
// call in many pays for it, and not every call. It does not use huge pages: to find some, a system
// may compact memory for milliseconds, in the middle of a request.
template <typename Item>
Pages<Item> allocate_pages(std::size_t num) {
  constexpr std::size_t kPage = 4096;
  const std::size_t num_bytes = (num * sizeof(Item) + kPage - 1) / kPage * kPage;
  void* const memory = std::aligned_alloc(kPage, num_bytes);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  ::madvise(memory, num_bytes, MADV_POPULATE_WRITE);  // older kernels refuse: then they fault
#endif
  return Pages<Item>(static_cast<Item*>(memory));
}

// Excludes pages from core dumps, since prompts can be read from them. `memory` is the address of
// the first page. Does nothing on a system that does not support it.
inline void leave_out_of_dumps(void* memory, std::size_t num_bytes) {
#if defined(__linux__) && defined(MADV_DONTDUMP)
  ::madvise(memory, num_bytes, MADV_DONTDUMP);
#else
  static_cast<void>(memory), static_cast<void>(num_bytes);
#endif
}

// Allocates `num` items of zeros, at least one, in huge pages if the system has some: for large
// tables of fixed size. It relies on the system's zeros; writing them again would double the time.
template <typename Item>
std::shared_ptr<Item[]> zeroed_pages(std::size_t num) {
  const std::size_t num_bytes = num * sizeof(Item);
#if defined(__linux__)
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* const memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  if (num_bytes >= kHugePage) ::madvise(memory, num_bytes, MADV_HUGEPAGE);
#endif
#if defined(MADV_POPULATE_WRITE)
  ::madvise(memory, num_bytes, MADV_POPULATE_WRITE);
#endif
  const auto give_back = [num_bytes](Item* items) { ::munmap(items, num_bytes); };
  return {static_cast<Item*>(memory), give_back};
#else
  void* const memory = std::calloc(num, sizeof(Item));
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<Item*>(memory), FreePages()};
#endif
}

}  // namespace kvtier
