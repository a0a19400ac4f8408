// A bounce, the way out: what a sending stage has packed goes to where the network reads it, and the
// mover is told.
//
// The stage says in `rung` what is complete. An epoch is pushed once; of a stage that has given up,
// nothing is. Every block has read all that it goes by before the first door is rung: peers cannot
// answer earlier, so the stage's next epoch changes none of it. What is staged stays as it is until
// it has arrived, as for a mover that reads it itself.
#pragma once
#include "bounce.cuh"

DEVICE u64* pushed_word(const Args& a, u32 half)
{
    return local_at<u64>(a, LOC_PUSHED, half_number(a, half));
}

// One thread of the grid: where the host wants to be told that all has come which the half takes that
// follows: of this epoch. Of an old one, where nothing is pushed, it has.
DEVICE void push_ticket(const Args& a, u32 half, u64 epoch)
{
    if (a.beside == 0 || blockIdx.x > 0 || threadIdx.x > 0) return;
    const u64 low = epoch & ((1ull << TICKET_BITS) - 1);
    st_release_sys(door_word(a, DOOR_TICKET + half), a.beside << TICKET_BITS | low);
}

// Whole block: its part of what this door speaks of is copied. True for one thread of the grid: so is
// everybody's, and it is the one that rings.
DEVICE bool push_over(const Args& a, u32 door)
{
    __syncthreads();  // every thread's part comes before the door
    if (threadIdx.x > 0) return false;
    u32* done = local_at<u32>(a, LOC_PUSH_PARTS, (a.slot * 4 + door) * 2 + (a.beside != 0));
    return atomic_inc_acq_rel_gpu(done, gridDim.x - 1) == gridDim.x - 1;
}

DEVICE void push_ring(const Args& a, u32 door, u64 epoch) { st_release_sys(door_word(a, door), epoch); }

// One block: fields [first, last) of the plan, for the mover.
DEVICE void push_plan(const Args& a, u32 first, u32 last)
{
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x)
        for (u32 field = first; is_remote(a, r) && field < last; ++field)
            st(flag_word(a, FLG_PLAN, pair_number(a, r) * PLAN_WORDS + field),
               ld(plan_word(a, r, field)));
}
