// Lines: 128 bytes whose last 8 are a flag, so that data and "it is there" travel together.
//
// Eight lanes write a line with one 16-byte store each. NVLink and the L2 cache deliver the
// 128-byte store of one warp instruction as a whole, so a reader that finds the flag finds the
// data: no fence, and no second trip for a flag. (NCCL's LL128 protocol rests on the same.) A line
// carries 15 words of 8 bytes; lane i of the eight has words 2i and 2i+1, the last one word 14 and
// the flag. One warp handles four lines at a time, a *piece* of 60 words.
#pragma once
#include "dtype.cuh"
#include "waits.cuh"

#define LINE_BYTES 128u
#define LINE_WORDS 15u
#define WARP_LINES 4u
#define WARP_WORDS (WARP_LINES * LINE_WORDS)

struct Pair {
    u64 low, high;
};

DEVICE bool holds_flag() { return lane_id() % 8 == 7; }

DEVICE u64 lane_address(u64 lines, u32 piece)
{
    return lines + piece * (WARP_LINES * LINE_BYTES) + lane_id() * 16;
}

DEVICE u32 num_pieces(u32 words) { return (words + WARP_WORDS - 1) / WARP_WORDS; }

// What a warp takes at a time: PIECES_AT_ONCE neighbouring pieces of one image, so that in large batches
// more loads are under way. What it does with pieces past the end comes to nothing (lane_live).
#define MOST_PIECES 2u  // PIECES_AT_ONCE at most
DEVICE u32 num_units(u32 words)
{
    return (num_pieces(words) + (u32)PIECES_AT_ONCE - 1) / (u32)PIECES_AT_ONCE;
}

// Whether the lane's line exists: an image of `words` may end before the piece does.
DEVICE bool lane_live(u32 piece, u32 words)
{
    return piece * WARP_WORDS + lane_id() / 8 * LINE_WORDS < words;
}

// Memory has words two by two, 16 bytes a lane; lines have 15 in a row. Lanes trade words so that
// both sides move 16 bytes at a time: half as many, and full, memory transactions.
#define PIECE_CHUNKS 30u  // 16-byte chunks of a piece: lanes 0 to 29 hold one each

DEVICE u64 traded(Pair v, u32 lane, bool second)
{
    const u64 low = __shfl_sync(FULL_WARP, v.low, lane), high = __shfl_sync(FULL_WARP, v.high, lane);
    return second ? high : low;
}

// As in lines → lane i has words 2i and 2i + 1 of the piece.
DEVICE Pair to_chunks(Pair v)
{
    const u32 first = lane_id() < PIECE_CHUNKS ? 2 * lane_id() : 0, second = first + 1;
    Pair chunk;
    chunk.low = traded(v, first / LINE_WORDS * 8 + first % LINE_WORDS / 2, first % LINE_WORDS & 1);
    chunk.high = traded(v, second / LINE_WORDS * 8 + second % LINE_WORDS / 2, second % LINE_WORDS & 1);
    return chunk;
}

// The other way round; flag lanes get `flag` for their second word.
DEVICE Pair to_lines(Pair chunk, u64 flag)
{
    const u32 first = lane_id() / 8 * LINE_WORDS + lane_id() % 8 * 2;
    const u32 second = holds_flag() ? first : first + 1;
    Pair v;
    v.low = traded(chunk, first / 2, first & 1);
    const u64 high = traded(chunk, second / 2, second & 1);
    v.high = holds_flag() ? flag : high;
    return v;
}

struct LineRead {
    Pair v;
    bool there;
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

DEVICE void st_line(u64 at, Pair v, bool live)
{
    if (live)
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(v.low), "l"(v.high)
                     : "memory");
}

// Reads the lane's part. The lines are there if `there` holds on all lanes (all_there).
DEVICE LineRead read_line(u64 at, u64 flag, bool live)
{
    LineRead r;
    r.v.low = r.v.high = 0;
    if (live)
        asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(r.v.low), "=l"(r.v.high)
                     : "l"(at)
                     : "memory");
    r.there = !live || !holds_flag() || r.v.high == flag;
    return r;
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

DEVICE LineRead read_line(u64 at, u64 flag, bool live)
{
    const u64* words = reinterpret_cast<const u64*>(at);
    LineRead r;
    r.v.low = r.v.high = 0;
    r.there = __all_sync(FULL_WARP, !live || !holds_flag() || ld_acquire_sys(words + 1) == flag);
    if (!r.there) return r;
    __syncwarp();  // what the flags' lanes acquired holds for all
    if (!live) return r;
    r.v.low = ld(words);
    r.v.high = holds_flag() ? flag : ld(words + 1);
    return r;
}

#endif

DEVICE bool all_there(const LineRead& r) { return __all_sync(FULL_WARP, r.there); }

template <u32 N>
DEVICE u32 first_missing(const LineRead* r)
{
    u32 first = N;
    UNROLL for (u32 i = N; i-- > 0;)
        if (!all_there(r[i])) first = i;
    return first;
}

// Where a piece comes from.
struct Piece {
    u64 lines;
    u32 number;
    u32 words;  // of the whole image
    Awaited who;

    DEVICE LineRead read(u64 epoch) const
    {
        return read_line(lane_address(lines, number), epoch, lane_live(number, words));
    }
};

// Waits until the pieces 0 to N - 1 of `pieces` have arrived; `r` has their first readings and gets
// what arrived. All lanes call it and get the same answer; false as in wait_for. All are read anew
// each time, so that what is kept while a thread looks up is not theirs: registers are scarce.
template <u32 N, class Pieces>
DEVICE bool wait_pieces(const Args& a, Pieces pieces, u64 epoch, LineRead* r)
{
    u32 first = first_missing<N>(r);
    if (first == N) return true;
    Piece piece = pieces(first);
    note_wait(reinterpret_cast<const u64*>(piece.lines + piece.number * (WARP_LINES * LINE_BYTES) + 120),
              epoch);
    const u64 start = global_timer_ns();
    for (u32 spins = 1;; ++spins) {
        const bool look = poll_pause(spins);
        UNROLL for (u32 i = 0; i < N; ++i) r[i] = pieces(i).read(epoch);
        const u32 still = first_missing<N>(r);
        bool late = false;
        if (still < N) {
            first = still;
        } else {  // `first` is the one that came last
            if (spins < FIRST_LOOK) return true;
            late = __any_sync(FULL_WARP, lane_id() == 0 && too_late(a, start));
            if (!late) return true;
        }
        if (!look && !late) continue;
        const bool over = lane_id() == 0 && given_up(a, start, late, pieces(first).who, epoch, epoch, 0);
        if (__any_sync(FULL_WARP, over)) return false;
    }
}

// One piece, of which `r` is a first reading.
DEVICE bool wait_piece(const Args& a, const Piece& piece, u64 epoch, LineRead& r)
{
    return wait_pieces<1>(a, [&](u32) { return piece; }, epoch, &r);
}
