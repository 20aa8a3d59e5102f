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

// Room for `num` items, which hold nothing defined. All pages are brought in at once: while an
// index grows, one call in many pays for it, and not every call. Not huge pages: to find some, a
// system may move memory around for milliseconds, in the middle of a request.
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

}  // namespace kvtier
