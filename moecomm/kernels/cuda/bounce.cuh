// A bounce: how push and pull carry bytes between the stages' image of the areas and the memory that
// the network reaches.
#pragma once
#include "remote_wait.cuh"

// Words of 16 bytes that a thread has under way: a load from the host takes about 2 µs, so 55 GB/s are
// 128 KiB on their way.
#define UNITS_AT_ONCE 4u

// Where the network has what the stages have at `address`.
DEVICE u64 at_network(const Args& a, u64 address) { return address - a.remote_bulk + a.network_bulk; }

// All threads of the grid copy one span after the other. The spans lie one behind the other for them:
// where one ends, other threads begin with the next, whole warps at a time.
struct Copier {
    u32 at;  // this thread's first unit of the next span

    DEVICE Copier() : at(blockIdx.x * blockDim.x + threadIdx.x) {}

    DEVICE void span(u64 to, u64 from, u64 bytes)
    {
        const u32 units = (u32)(bytes / 16), threads = gridDim.x * blockDim.x;
        for (u32 i = at; i < units; i += UNITS_AT_ONCE * threads) {
            uint4 held[UNITS_AT_ONCE];
            UNROLL for (u32 n = 0; n < UNITS_AT_ONCE; ++n)
                if (i + n * threads < units) held[n] = ld_v4((const void*)(from + (i + n * threads) * 16ull));
            UNROLL for (u32 n = 0; n < UNITS_AT_ONCE; ++n)
                if (i + n * threads < units) st_v4((void*)(to + (i + n * threads) * 16ull), held[n]);
        }
        const u32 taken = (units + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE;
        at = (at + threads - taken % threads) % threads;
    }
};
