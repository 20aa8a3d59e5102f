// Copies fragments between accelerator memory and page-locked host memory.
//
// The accelerator reads and writes host memory over the bus. A warp copies one fragment at a time,
// 512 bytes with each instruction, and has 4 KiB under way. A few multiprocessors keep the bus busy
// in this way; the others compute.
//
// dst, src, size: addresses and bytes of each fragment, all multiples of 16.

typedef unsigned long long Word;

constexpr unsigned warp_size = 32;
constexpr unsigned steps = 8;  // reads under way in each thread

extern "C" __global__ void __launch_bounds__(1024)
copy_fragments(const Word *dst, const Word *src, const Word *size, unsigned num_fragments) {
    const unsigned lane = threadIdx.x % warp_size;
    const unsigned num_warps = gridDim.x * blockDim.x / warp_size;
    unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size;
    if (at >= num_fragments) return;
    Word next_to = dst[at], next_from = src[at], next_size = size[at];
#pragma unroll 1
    while (at < num_fragments) {
        uint4 *const to = reinterpret_cast<uint4 *>(next_to);
        const uint4 *const from = reinterpret_cast<const uint4 *>(next_from);
        const Word count = next_size / sizeof(uint4);
        at += num_warps;
        if (at < num_fragments) {  // the table is in host memory: read ahead
            next_to = dst[at];
            next_from = src[at];
            next_size = size[at];
        }
#pragma unroll 1
        for (Word first = lane; first < count; first += steps * warp_size) {
            uint4 held[steps];
#pragma unroll
            for (unsigned step = 0; step < steps; ++step)
                if (first + step * warp_size < count)
                    held[step] = __ldcs(from + first + step * warp_size);
#pragma unroll
            for (unsigned step = 0; step < steps; ++step)
                if (first + step * warp_size < count)
                    __stcs(to + first + step * warp_size, held[step]);
        }
    }
}
