// REMOTE == 2: puts as NVSHMEM has them. Addresses are those of this rank's own part of the
// symmetric heap, and mean the same place in the peer's.
//
// NVSHMEM's own puts are stores where the peer's heap is mapped, as within a node. That half is here
// (LOC_REMOTE_BASE: where each is mapped, or 0), also for the emulator; the other calls what the
// device archive has beneath its inline functions, by name, so that no headers are needed.
// kernels/nvshmem_link.py says which versions have these names.
#pragma once

#if HAS_REMOTE == 2 && (defined(__CUDACC__) || defined(__CUDACC_RTC__))

#define TRANSFER_PUT_SIGNAL(scope) \
    _Z28nvshmemi_transfer_put_signalIL13threadgroup_t##scope##EEvPvS1_mS1_m14nvshmemi_amo_tib
#define TRANSFER_SIGNAL _Z30nvshmemi_transfer_amo_nonfetchImEvPvT_i14nvshmemi_amo_t
#define TRANSFER_UPDATE _Z36nvshmemi_transfer_syncapi_update_memv
#define SCOPE_WARP 1
#define SCOPE_BLOCK 3
#define SIGNAL_SET 9

extern "C" __device__ void TRANSFER_PUT_SIGNAL(1)(void* to, void* from, unsigned long bytes,
                                                  void* flag, unsigned long value, int op, int pe,
                                                  bool nbi);
extern "C" __device__ void TRANSFER_PUT_SIGNAL(3)(void* to, void* from, unsigned long bytes,
                                                  void* flag, unsigned long value, int op, int pe,
                                                  bool nbi);
extern "C" __device__ void TRANSFER_SIGNAL(void* word, unsigned long value, int pe, int op);
extern "C" __device__ void TRANSFER_UPDATE();

DEVICE void network_put_block(u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    TRANSFER_PUT_SIGNAL(3)((void*)to, (void*)from, bytes, flag, value, SIGNAL_SET, (int)peer, true);
}

DEVICE void network_put_warp(u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    TRANSFER_PUT_SIGNAL(1)((void*)to, (void*)from, bytes, flag, value, SIGNAL_SET, (int)peer, true);
}

DEVICE void network_put_word(u64 peer, u64* word, u64 value)
{
    __threadfence_system();
    TRANSFER_SIGNAL(word, value, (int)peer, SIGNAL_SET);
}

DEVICE void network_update() { TRANSFER_UPDATE(); }

#else
// The emulator maps every heap.
DEVICE void network_put_block(u64, u64, u64, u64, u64*, u64) {}
DEVICE void network_put_warp(u64, u64, u64, u64, u64*, u64) {}
DEVICE void network_put_word(u64, u64*, u64) {}
DEVICE void network_update() {}
#endif

// Where the peer's heap is mapped here; 0: it is not.
DEVICE u64 heap_of(const Args& a, u64 peer) { return ld(local_at<u64>(a, LOC_REMOTE_BASE, peer)); }

// One of `num` threads stores its part.
DEVICE void put_part(u64 to, u64 from, u64 bytes, u32 id, u32 num)
{
    const u64 step = num * 16;
    for (u64 i = id * 16; i < bytes; i += CHUNKS_AT_ONCE * step) {
        uint4 part[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (i + n * step < bytes) part[n] = ld_v4((const void*)(from + i + n * step));
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (i + n * step < bytes) st_v4((void*)(to + i + n * step), part[n]);
    }
}

// One thread: `value` to the peer's `word`, after everything that this thread knows of.
DEVICE void put_word(const Args& a, u64 peer, u64* word, u64 value)
{
    const u64 heap = heap_of(a, peer);
    if (!heap) return network_put_word(peer, word, value);
    st_release_sys(reinterpret_cast<u64*>(heap + ((u64)word - a.symmetric)), value);
}

// All threads of a block, behind a barrier; there is another one inside. `bytes` from `from` to the
// peer's `to`, then, when they are there, `value` to its `flag`. Nobody waits; `from` must stay as
// it is.
DEVICE void put_block(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    const u64 heap = heap_of(a, peer);
    if (!heap) {
        network_put_block(peer, to, from, bytes, flag, value);
        __syncthreads();
        return;
    }
    put_part(heap + (to - a.symmetric), from, bytes, threadIdx.x, blockDim.x);
    __syncthreads();  // all of it comes before the flag
    if (threadIdx.x == 0) put_word(a, peer, flag, value);
}

// The same for the lanes of a warp.
DEVICE void put_warp(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    const u64 heap = heap_of(a, peer);
    if (!heap) {
        network_put_warp(peer, to, from, bytes, flag, value);
        __syncwarp();
        return;
    }
    put_part(heap + (to - a.symmetric), from, bytes, lane_id(), WARP_SIZE);
    __syncwarp();  // all of it comes before the flag
    if (lane_id() == 0) put_word(a, peer, flag, value);
}

// A flag that came with a put has been seen: what it came with may be read now.
DEVICE void after_arrival(const Args& a, u64 peer)
{
    if (REMOTE == 2 && !heap_of(a, peer)) network_update();
}
