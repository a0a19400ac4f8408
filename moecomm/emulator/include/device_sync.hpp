// Block barriers and warp collectives. The runtime parks a thread until its partners are there.
//
// Volta rules: a collective is joined by the threads its mask names, all with the same mask and
// operation; threads that have exited are not waited for. __syncthreads waits for all threads of
// the block that have not exited.
#pragma once

#include "abi.hpp"

#include <string.h>

namespace emu {

EMU_WITHIN u64 block_barrier(BarrierOp op, u32 predicate)
{
    Thread* t = self();
    note_place(t);
    return t->api->block_barrier(t, op, predicate);
}

EMU_WITHIN u64 warp(WarpOp op, u32 mask, u64 value, u32 source_lane = 0)
{
    Thread* t = self();
    note_place(t);
    return t->api->warp(t, op, mask, value, source_lane);
}

template <class T>
EMU_WITHIN u64 to_bits(T v)
{
    static_assert(sizeof(T) <= 8, "warp collectives move at most 8 bytes");
    u64 bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}

template <class T>
EMU_WITHIN T from_bits(u64 bits)
{
    T v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

// The lane a shuffle reads from. Out of the segment: its own.
EMU_WITHIN u32 clamp_up(u32 lane, u32 delta, u32 width)
{
    return lane % width < delta ? lane : lane - delta;
}
EMU_WITHIN u32 clamp_down(u32 lane, u32 delta, u32 width)
{
    return lane % width + delta >= width ? lane : lane + delta;
}
EMU_WITHIN u32 clamp_xor(u32 lane, u32 bits, u32 width)
{
    const u32 other = (lane ^ bits) & 31u;
    return other >= lane / width * width + width ? lane : other;
}

}  // namespace emu

EMU_CALLED void __syncthreads() { emu::block_barrier(emu::BarrierOp::plain, 0); }
EMU_CALLED int __syncthreads_or(int p) { return (int)emu::block_barrier(emu::BarrierOp::any, p != 0); }
EMU_CALLED int __syncthreads_and(int p) { return (int)emu::block_barrier(emu::BarrierOp::all, p != 0); }
EMU_CALLED int __syncthreads_count(int p)
{
    return (int)emu::block_barrier(emu::BarrierOp::count, p != 0);
}

EMU_CALLED void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp(emu::WarpOp::sync, mask, 0); }

template <class T>
EMU_CALLED T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
    const u32 own = emu::self()->lane, w = (u32)width;
    const u32 from = own / w * w + (u32)lane % w;
    return emu::from_bits<T>(emu::warp(emu::WarpOp::shuffle, mask, emu::to_bits(v), from));
}

template <class T>
EMU_CALLED T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    const u32 from = emu::clamp_up(emu::self()->lane, delta, (u32)width);
    return emu::from_bits<T>(emu::warp(emu::WarpOp::shuffle_up, mask, emu::to_bits(v), from));
}

template <class T>
EMU_CALLED T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    const u32 from = emu::clamp_down(emu::self()->lane, delta, (u32)width);
    return emu::from_bits<T>(emu::warp(emu::WarpOp::shuffle_down, mask, emu::to_bits(v), from));
}

template <class T>
EMU_CALLED T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32)
{
    const u32 from = emu::clamp_xor(emu::self()->lane, (u32)bits, (u32)width);
    return emu::from_bits<T>(emu::warp(emu::WarpOp::shuffle_xor, mask, emu::to_bits(v), from));
}

EMU_CALLED unsigned __ballot_sync(unsigned mask, int p)
{
    return (unsigned)emu::warp(emu::WarpOp::ballot, mask, p != 0);
}
EMU_CALLED int __any_sync(unsigned mask, int p) { return (int)emu::warp(emu::WarpOp::any, mask, p != 0); }
EMU_CALLED int __all_sync(unsigned mask, int p) { return (int)emu::warp(emu::WarpOp::all, mask, p != 0); }

template <class T>
EMU_CALLED unsigned __match_any_sync(unsigned mask, T v)
{
    return (unsigned)emu::warp(emu::WarpOp::match_any, mask, emu::to_bits(v));
}

template <class T>
EMU_CALLED unsigned __match_all_sync(unsigned mask, T v, int* all)
{
    const unsigned lanes = (unsigned)emu::warp(emu::WarpOp::match_all, mask, emu::to_bits(v));
    *all = lanes != 0;
    return lanes;
}

// 32-bit reductions (compute capability 8.0). min and max go by the type's signedness.
#define MOECOMM_EMU_REDUCE(name, T, op, offset)                                            \
    EMU_CALLED T name(unsigned mask, T v)                                                      \
    {                                                                                      \
        return (T)((u32)emu::warp(emu::WarpOp::op, mask, (u32)v ^ offset) ^ offset);       \
    }
MOECOMM_EMU_REDUCE(__reduce_add_sync, unsigned, reduce_add, 0u)
MOECOMM_EMU_REDUCE(__reduce_add_sync, int, reduce_add, 0u)
MOECOMM_EMU_REDUCE(__reduce_min_sync, unsigned, reduce_min, 0u)
MOECOMM_EMU_REDUCE(__reduce_min_sync, int, reduce_min, 0x80000000u)
MOECOMM_EMU_REDUCE(__reduce_max_sync, unsigned, reduce_max, 0u)
MOECOMM_EMU_REDUCE(__reduce_max_sync, int, reduce_max, 0x80000000u)
MOECOMM_EMU_REDUCE(__reduce_and_sync, unsigned, reduce_and, 0u)
MOECOMM_EMU_REDUCE(__reduce_or_sync, unsigned, reduce_or, 0u)
MOECOMM_EMU_REDUCE(__reduce_xor_sync, unsigned, reduce_xor, 0u)
#undef MOECOMM_EMU_REDUCE
