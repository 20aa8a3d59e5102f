// What tests say to a fake, and ask it: the same for every vendor.
#include <cstring>

#include "exports.hpp"

using fake::Address;
using fake::machine;

namespace {

// Lines, one per entry, cut where the buffer ends.
long give(const std::vector<std::string> &lines, char *to, std::size_t size) {
    std::string all;
    for (const std::string &line : lines) all += line + "\n";
    if (size > 0) {
        const std::size_t length = std::min(all.size(), size - 1);
        std::memcpy(to, all.data(), length);
        to[length] = 0;
    }
    return static_cast<long>(lines.size());
}

}  // namespace

FAKE void fake_reset(unsigned seed, int late_reads, int max_delay_us) {
    machine().reset(seed, late_reads != 0, max_delay_us);
    fake::reset_vendor();
}
FAKE void fake_hold(int on) { machine().hold(on != 0); }
FAKE void fake_fail_call(const char *name, int nth, int code) {
    machine().fail_call(name, nth, code);
}
FAKE void fake_fail_entry(int nth_batch, std::size_t entry, int code) {
    machine().fail_entry(nth_batch, entry, code);
}
FAKE void fake_fail_late(int nth_copy, int code) { machine().fail_late(nth_copy, code); }
FAKE void fake_lose_device(int code) { machine().lose_device(code); }
FAKE void fake_feature(int on) { fake::vendor_feature = on != 0; }
FAKE Address fake_allocate(std::size_t size, int device) {
    return machine().allocate(size, device, fake::Kind::device);
}
FAKE int fake_free(Address at) { return machine().release(at, fake::Kind::device) ? 0 : 1; }
FAKE void fake_adopt(Address at, std::size_t size, int device) {
    machine().adopt(at, size, device);
}
FAKE void fake_disown(Address at) { machine().disown(at); }
FAKE void fake_cut(Address at) { machine().cut(at); }
FAKE int fake_peek(Address at, void *to, std::size_t size) {
    return machine().peek(at, to, size) ? 0 : 1;
}
FAKE int fake_poke(Address at, const void *from, std::size_t size) {
    return machine().poke(at, from, size) ? 0 : 1;
}
FAKE void *fake_compute_stream(int device) { return machine().make_stream(device, true); }
FAKE void fake_fill(Address at, std::size_t size, int value, void *stream) {
    auto *on = stream ? static_cast<fake::Stream *>(stream) : machine().legacy_stream(0);
    machine().submit_fill(on, at, size, value);
}
FAKE void fake_wait_for(void *stream) {
    machine().synchronize(static_cast<fake::Stream *>(stream));
}
FAKE long fake_count(const char *name) {
    auto counts = machine().counts();
    return counts.count(name) ? counts[name] : 0;
}
FAKE long fake_num_pending() { return machine().num_pending(); }
FAKE long fake_violations(char *to, std::size_t size) {
    return give(machine().violations(), to, size);
}
FAKE long fake_leaks(char *to, std::size_t size) { return give(machine().leaks(), to, size); }
