// The memory of a machine: device memory that only the driver reaches, and page-locked host memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace fake {
namespace {

constexpr std::size_t page = 4096;

std::size_t whole_pages(std::size_t size) { return (size + page - 1) / page * page; }

}  // namespace

void Machine::adopt(Address at, std::size_t size, int device) {
    std::lock_guard lock(mutex_);
    ranges_.push_back({at, size, Kind::device, device, at, false, false});
}

void Machine::disown(Address at) {
    std::lock_guard lock(mutex_);
    ranges_.erase(std::remove_if(ranges_.begin(), ranges_.end(),
                                 [&](Range &r) { return r.begin == at && !r.is_owned; }),
                  ranges_.end());
}

void Machine::cut(Address at) {
    std::lock_guard lock(mutex_);
    cuts_.push_back(at);
}

bool Machine::is_cut(Address at, std::size_t size) {
    return std::any_of(cuts_.begin(), cuts_.end(),
                       [&](Address cut) { return at < cut && cut < at + size; });
}

bool Machine::peek(Address at, void *to, std::size_t size) {
    std::lock_guard lock(mutex_);
    const Address alias = reach(at, size);
    if (alias) std::memcpy(to, reinterpret_cast<void *>(alias), size);
    return alias != 0;
}

bool Machine::poke(Address at, const void *from, std::size_t size) {
    std::lock_guard lock(mutex_);
    const Address alias = reach(at, size);
    if (alias) std::memcpy(reinterpret_cast<void *>(alias), from, size);
    return alias != 0;
}

Range *Machine::find(Address at, std::size_t size) {
    for (Range &range : ranges_)
        if (range.contains(at, size)) return &range;
    return nullptr;
}

Address Machine::reach(Address at, std::size_t size) {
    Range *range = find(at, size);
    return range ? range->alias + (at - range->begin) : 0;
}

Address Machine::allocate(std::size_t size, int device, Kind kind) {
    std::lock_guard lock(mutex_);
    if (size == 0) return 0;
    // With a page on either side that nobody may touch.
    const std::size_t whole = whole_pages(size);
    const int file = memfd_create("fake", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return 0;
    void *area = mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *begin = static_cast<char *>(area) + page;
    const int access = kind == Kind::device ? PROT_NONE : PROT_READ | PROT_WRITE;
    mmap(begin, whole, access, MAP_SHARED | MAP_FIXED, file, 0);
    void *alias = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    ranges_.push_back({reinterpret_cast<Address>(begin), size, kind, device,
                       reinterpret_cast<Address>(alias), true, false});
    return reinterpret_cast<Address>(begin);
}

void Machine::drop_memory(Range &range) {
    if (!range.is_owned) return;
    munmap(reinterpret_cast<void *>(range.begin - page), whole_pages(range.size) + 2 * page);
    munmap(reinterpret_cast<void *>(range.alias), whole_pages(range.size));
}

bool Machine::release(Address at, Kind kind) {
    std::unique_lock lock(mutex_);
    for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
        if (range->begin != at || range->kind != kind || !range->is_owned) continue;
        if (has_pending(at, range->size))
            violations_.push_back("memory was freed while a copy of it was pending");
        cuts_.erase(std::remove_if(cuts_.begin(), cuts_.end(),
                                   [&](Address cut) { return range->touches(cut, 1); }),
                    cuts_.end());
        drop_memory(*range);
        ranges_.erase(range);
        return true;
    }
    return false;
}

Machine::Lock Machine::lock(Address at, std::size_t size, int device) {
    std::lock_guard lock(mutex_);
    for (Range &range : ranges_)
        if (range.touches(at, size)) return Lock::overlaps;
    ranges_.push_back({at, size, Kind::pinned, device, at, false, true});
    return Lock::ok;
}

bool Machine::unlock(Address at) {
    std::lock_guard lock(mutex_);
    for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
        if (range->begin != at || !range->is_registered) continue;
        if (has_pending(at, range->size))
            violations_.push_back("host memory was unregistered while a copy of it was pending");
        ranges_.erase(range);
        return true;
    }
    return false;
}

Machine::Place Machine::place(Address at, std::size_t size, int device) {
    std::lock_guard lock(mutex_);
    Range *range = find(at, size);
    if (range && !is_cut(at, size)) {
        if (range->kind == Kind::pinned) return Place::pinned;
        return range->device == device ? Place::device : Place::other_device;
    }
    for (Range &each : ranges_)
        if (each.touches(at, size)) {
            violations_.push_back("a copy leaves the piece of memory that it begins in");
            return Place::broken;
        }
    return Place::pageable;
}

void Machine::claim(Address at, std::size_t size, bool is_written) {
    std::lock_guard lock(mutex_);
    const Claim made{at, size, is_written};
    for (const Claim &other : claims_)
        if (other.conflicts(at, size, is_written))
            violations_.push_back("storage moves the same bytes twice at a time");
    for (auto &stream : streams_)
        for (Op &op : stream->ops)
            for (Copy &copy : op.copies)
                if (made.conflicts(copy)) {
                    violations_.push_back("storage moves bytes that a stream is not done with");
                    claims_.push_back(made);
                    return;
                }
    claims_.push_back(made);
}

void Machine::unclaim(Address at, std::size_t size) {
    std::lock_guard lock(mutex_);
    auto found = std::find_if(claims_.begin(), claims_.end(),
                              [&](Claim &each) { return each.at == at && each.size == size; });
    if (found != claims_.end()) claims_.erase(found);
}

bool Machine::has_pending(Address at, std::size_t size) {
    for (const Claim &claim : claims_)
        if (overlap(claim.at, claim.size, at, size)) return true;
    for (auto &stream : streams_)
        for (Op &op : stream->ops)
            for (Copy &copy : op.copies)
                if (overlap(copy.dst, copy.size, at, size) || overlap(copy.src, copy.size, at, size))
                    return true;
    return false;
}

}  // namespace fake
