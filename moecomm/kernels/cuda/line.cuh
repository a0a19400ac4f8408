// Lines: 128 bytes whose last 8 are a flag, so that data and "it is there" travel together.
//
// Eight lanes write a line with one 16-byte store each. NVLink and the L2 cache deliver the
// 128-byte store of one warp instruction as a whole, so a reader that finds the flag finds the
// data: no fence, and no second trip for a flag. (NCCL's LL128 protocol rests on the same.) A line
// carries 15 words of 8 bytes; lane i of the eight has words 2i and 2i+1, the last one word 14 and
// the flag. One warp handles four lines: 60 words.
#pragma once
#include "protocol.cuh"

#define LINE_BYTES 128u
#define LINE_WORDS 15u
#define WARP_LINES 4u
#define WARP_WORDS (WARP_LINES * LINE_WORDS)

struct Pair {
    u64 low, high;
};

DEVICE bool holds_flag() { return lane_id() % 8 == 7; }

// The lane's first word in the warp's piece `piece` of an image; the next one is its second, unless
// the lane holds the flag.
DEVICE u32 lane_word(u32 piece)
{
    return piece * WARP_WORDS + lane_id() / 8 * LINE_WORDS + lane_id() % 8 * 2;
}

DEVICE u64 lane_address(u64 lines, u32 piece) { return lines + piece * (WARP_LINES * LINE_BYTES) + lane_id() * 16; }

DEVICE u32 num_pieces(u32 words) { return (words + WARP_WORDS - 1) / WARP_WORDS; }

// Whether the lane's line exists: an image of `words` may end before the piece does.
DEVICE bool lane_live(u32 piece, u32 words)
{
    return piece * WARP_WORDS + lane_id() / 8 * LINE_WORDS < words;
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

DEVICE void st_line(u64 at, Pair v, bool live)
{
    if (live)
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(v.low), "l"(v.high)
                     : "memory");
}

// True if all live lines of the warp carry the flag.
DEVICE bool ld_line(u64 at, u64 flag, bool live, Pair* v)
{
    if (live)
        asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(v->low), "=l"(v->high)
                     : "l"(at)
                     : "memory");
    return __all_sync(FULL_WARP, !live || !holds_flag() || v->high == flag);
}

#else

// The same contract in terms that the emulator checks: data, then the flag's release; the flag's
// acquire, then data.
DEVICE void st_line(u64 at, Pair v, bool live)
{
    u64* words = reinterpret_cast<u64*>(at);
    if (live) {
        st(words, v.low);
        if (!holds_flag()) st(words + 1, v.high);
    }
    __syncwarp();
    if (live && holds_flag()) st_release_sys(words + 1, v.high);
}

DEVICE bool ld_line(u64 at, u64 flag, bool live, Pair* v)
{
    const u64* words = reinterpret_cast<const u64*>(at);
    const bool there = !live || !holds_flag() || ld_acquire_sys(words + 1) == flag;
    if (!__all_sync(FULL_WARP, there)) return false;
    __syncwarp();  // what the flags' lanes acquired holds for all
    if (!live) return true;
    v->low = ld(words);
    v->high = holds_flag() ? flag : ld(words + 1);
    return true;
}

#endif

// Waits until the warp's piece of `lines` has arrived. All lanes call it and get the same answer;
// false as in wait_for.
DEVICE bool wait_line(const Args& a, u64 lines, u32 piece, u32 words, u64 epoch, u32 phase, u32 peer,
                      Pair* v)
{
    const u64 at = lane_address(lines, piece);
    const bool live = lane_live(piece, words);
    if (ld_line(at, epoch, live, v)) return true;
    note_wait(reinterpret_cast<const u64*>(lines + piece * (WARP_LINES * LINE_BYTES) + 120), epoch);
    const u64 start = global_timer_ns();
    for (u32 spins = 1;; ++spins) {
        const bool look = poll_pause(spins);
        if (ld_line(at, epoch, live, v)) return true;
        if (!look) continue;
        const bool late = global_timer_ns() - start > a.timeout_ns;
        if (__any_sync(FULL_WARP, aborted(a, epoch))) return false;
        if (!__any_sync(FULL_WARP, late)) continue;
        if (lane_id() == 0) report_timeout(a, phase, peer, epoch, epoch, 0);
        return false;
    }
}
