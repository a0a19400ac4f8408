// REMOTE == 2: the few things that kernels ask of NVSHMEM.
//
// Addresses are those of this rank's own symmetric memory; NVSHMEM finds the same place at the
// peer. On a GPU the functions come from the shim that is linked to the kernel (shim.cu); the emulator
// stores through the peer's address, and lets other threads run in between.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#if HAS_REMOTE == 2
extern "C" __device__ int moecomm_put_block(u64 to, u64 from, u64 bytes, u64 flag, u64 value, int peer);
extern "C" __device__ int moecomm_put_warp(u64 to, u64 from, u64 bytes, u64 flag, u64 value, int peer);
extern "C" __device__ int moecomm_put_word(u64 word, u64 value, int peer);
extern "C" __device__ int moecomm_after_arrival(u64 word, u64 value);
#else
DEVICE int moecomm_put_block(u64, u64, u64, u64, u64, int) { return 0; }
DEVICE int moecomm_put_warp(u64, u64, u64, u64, u64, int) { return 0; }
DEVICE int moecomm_put_word(u64, u64, int) { return 0; }
DEVICE int moecomm_after_arrival(u64, u64) { return 0; }
#endif

// All threads of a block, behind a barrier; there is another one inside. `bytes` from `from` to the peer's `to`, then, when they
// are there, `value` to its `flag`. Nobody waits; `from` must stay as it is.
DEVICE void put_block(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    moecomm_put_block(to, from, bytes, (u64)flag, value, (int)peer);
}

DEVICE void put_warp(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    moecomm_put_warp(to, from, bytes, (u64)flag, value, (int)peer);
}

// One thread: `value` to the peer's `word`, after everything that this thread has read.
DEVICE void put_word(const Args& a, u64 peer, u64* word, u64 value)
{
    moecomm_put_word((u64)word, value, (int)peer);
}

// A flag that a put carried has been seen at `value`: what it came with may be read now.
DEVICE void after_arrival(u64* flag, u64 value) { moecomm_after_arrival((u64)flag, value); }

#else

DEVICE u64 at_peer(const Args& a, u64 peer, u64 address)
{
    return ld(local_at<u64>(a, LOC_REMOTE_BASE, peer)) + (address - a.symmetric);
}

DEVICE void put_part(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u32 id, u32 num)
{
    for (u64 i = id * 16; i < bytes; i += num * 16)
        st_v4((void*)(at_peer(a, peer, to) + i), ld_v4((const void*)(from + i)));
}

DEVICE void put_word(const Args& a, u64 peer, u64* word, u64 value)
{
    st_release_sys(reinterpret_cast<u64*>(at_peer(a, peer, (u64)word)), value);
}

DEVICE void put_block(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    put_part(a, peer, to, from, bytes, threadIdx.x, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) put_word(a, peer, flag, value);
}

DEVICE void put_warp(const Args& a, u64 peer, u64 to, u64 from, u64 bytes, u64* flag, u64 value)
{
    put_part(a, peer, to, from, bytes, lane_id(), WARP_SIZE);
    __syncwarp();
    if (lane_id() == 0) put_word(a, peer, flag, value);
}

DEVICE void after_arrival(u64*, u64) {}

#endif
