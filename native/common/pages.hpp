// Pieces of memory that are about to be filled.
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

// Huge pages make look-ups in a large table faster; but to find some, a system may move memory
// around for milliseconds: they are for what is made before any request comes.
enum class PageSize : std::size_t { usual = 4096, huge = 2 << 20 };

// Room for `num` items, which hold nothing defined. All pages are brought in at once: while an
// index grows, one call in many pays for it, and not every call.
template <typename Item>
Pages<Item> allocate_pages(std::size_t num, PageSize size = PageSize::usual) {
  const auto page = static_cast<std::size_t>(size);
  const std::size_t num_bytes = (num * sizeof(Item) + page - 1) / page * page;
  void* const memory = std::aligned_alloc(page, num_bytes);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (size == PageSize::huge) ::madvise(memory, num_bytes, MADV_HUGEPAGE);
#endif
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  ::madvise(memory, num_bytes, MADV_POPULATE_WRITE);  // older kernels refuse: then they fault
#endif
  return Pages<Item>(static_cast<Item*>(memory));
}

}  // namespace kvtier
