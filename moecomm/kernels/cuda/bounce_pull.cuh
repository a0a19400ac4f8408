// A bounce, the way in: once all that a receiving half takes has come from every remote rank, it goes
// from where the network left it to where the stage reads it.
//
// Pull runs ahead of the receiving stage, in its stream; and, to be done when that begins, also on a
// stream of its own, once the mover says that all is there: then it looks, and waits for nothing.
// Whichever of the two finds first that all has come claims the epoch and copies; the stage waits for
// `pulled`. So nothing depends on the one beside. It may even be late, and find the next epoch: what
// that overwrites has been read by then, or peers would not have sent it.
//
// Block 0 waits, and tells the others by `pull_go`. The two have words of their own for that.
// Multiprocessors may be full of stages that wait for `pulled`. The stage behind a pull starts only
// when that knows what it does; and beside, nothing is claimed before all blocks are there to copy it.
#pragma once
#include "bounce.cuh"

#define GO_HOME 1ull     // nothing is to be copied
#define GO_COPY 2ull     // + epoch

// A channel of what one launch keeps.
DEVICE u64 pull_number(const Args& a, u32 half) { return half_number(a, half) * 2 + (a.beside != 0); }

DEVICE u32* pull_count(const Args& a, u64 source)
{
    return local_at<u32>(a, LOC_PULL_COUNT, (a.slot * 2 + (a.beside != 0)) * NUM_RANKS + source);
}

// One thread: `channel` of a remote rank has reached `epoch`. False: as wait_for, or beside: not yet.
DEVICE bool has_arrived(const Args& a, u64 source, u32 channel, u64 epoch, u32 phase)
{
    const u64* word = arrived_word(a, source, channel);
    if (a.beside) return ld_acquire_sys(word) >= epoch;
    u64 last;
    return wait_for(a, word, FlagReached{epoch}, epoch, epoch, from_rank(phase, (u32)source), &last);
}

// One thread: what was claimed for `claimed` has been copied. False: as has_arrived; if it never is,
// nobody is to blame but this rank.
DEVICE bool is_copied(const Args& a, u32 half, u64 claimed, u64 epoch, u32 phase)
{
    const u64* word = pulled_word(a, half);
    if (a.beside) return ld_acquire_sys(word) >= claimed;
    u64 last;
    return wait_for(a, word, FlagReached{claimed}, claimed, epoch, from_rank(phase, (u32)a.rank), &last);
}

DEVICE u64* claim_word(const Args& a, u32 half)
{
    return local_at<u64>(a, LOC_PULL_CLAIM, half_number(a, half));
}

// Beside: how many of this launch's other blocks have begun. Block 0 waits for them, and holds up
// nobody, for the pull in line may claim meanwhile. False: it has, or it is no use any more.
DEVICE u64* here_word(const Args& a, u32 half)
{
    return local_at<u64>(a, LOC_PULL_HERE, half_number(a, half));
}

DEVICE bool all_here(const Args& a, u32 half, u64 epoch)
{
    const u64* here = here_word(a, half);
    note_wait(here, gridDim.x - 1);
    const u64 start = global_timer_ns();
    for (u32 spins = 1; ld_relaxed_sys(here) < gridDim.x - 1; ++spins) {
        const bool look = poll_pause(spins);
        if (ld_relaxed_sys(claim_word(a, half)) >= epoch) return false;
        if (look && (hear_abort(a) != 0 || global_timer_ns() - start > a.timeout_ns)) return false;
    }
    return true;
}

// One thread: claims an epoch that has come, one after the other: of a handle that was closed with its
// rows on the way, the pull beside may still copy when the slot's next rows are there.
DEVICE bool take(const Args& a, u32 half, u64 epoch, u32 phase)
{
    u64* claim = claim_word(a, half);
    if (a.beside && !all_here(a, half, epoch)) return false;
    for (;;) {
        const u64 before = ld_relaxed_sys(claim);
        if (!is_copied(a, half, min(before, epoch), epoch, phase) || before >= epoch) return false;
        if (cas_relaxed_sys(claim, before, epoch) == before) return true;
    }
}

// Block 0: whether this launch copies. One thread says of which epoch: beside, it may change.
template <class Half>
DEVICE u64 find_out(const Args& a, u64* shared)
{
    if (threadIdx.x == 0) *shared = Half::present_epoch(a);
    __syncthreads();
    const u64 epoch = *shared;
    const bool wanted = load_abort(a) == 0 && ld_acquire_sys(pulled_word(a, Half::HALF)) < epoch;
    note_epoch(epoch);
    if (!__syncthreads_and(wanted)) return GO_HOME;
    bool come = true;
    for (u64 r = threadIdx.x; r < NUM_RANKS && come; r += blockDim.x)
        if (is_remote(a, r)) come = Half::has_come(a, r, epoch);
    if (!__syncthreads_and(come)) {
        if (!a.beside && threadIdx.x == 0) wake_streams(a);
        return GO_HOME;
    }
    const bool mine = threadIdx.x == 0 && take(a, Half::HALF, epoch, Half::PHASE);
    return __syncthreads_or(mine) ? GO_COPY + epoch : GO_HOME;
}

// What block 0 found out, in every thread. `shared`: a word of shared memory.
template <class Half>
DEVICE u64 learn(const Args& a, u64* shared)
{
    u64* word = local_at<u64>(a, LOC_PULL_GO, pull_number(a, Half::HALF));
    if (a.beside && blockIdx.x > 0 && threadIdx.x == 0) atomicAdd(here_word(a, Half::HALF), 1ull);
    u64 go = blockIdx.x == 0 ? find_out<Half>(a, shared) : 0;
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) {
            st_release_sys(word, go);
        } else {
            note_wait(word, 1);  // block 0 runs, and its waits end
            for (u32 spins = 1; (go = ld_acquire_sys(word)) == 0; ++spins) poll_pause(spins);
        }
        *shared = go;
    }
    __syncthreads();
    return *shared;
}

// Half::copy copies with all threads of the grid. `shared`: see kernels/geometry.py.
template <class Half>
DEVICE void pull(const Args& a, u64* shared)
{
    const u64 go = learn<Half>(a, shared);
    let_next_kernel_start();
    if (go >= GO_COPY) {
        note_epoch(go - GO_COPY);
        Half::copy(a, reinterpret_cast<u32*>(shared + 1));
    }
    __syncthreads();  // every thread's part comes before `pulled`
    if (threadIdx.x > 0) return;
    u32* done = local_at<u32>(a, LOC_PULL_PARTS, pull_number(a, Half::HALF));
    if (atomic_inc_acq_rel_gpu(done, gridDim.x - 1) != gridDim.x - 1) return;
    st(local_at<u64>(a, LOC_PULL_GO, pull_number(a, Half::HALF)), 0ull);
    if (a.beside) st(here_word(a, Half::HALF), 0ull);
    if (go >= GO_COPY) st_release_sys(pulled_word(a, Half::HALF), go - GO_COPY);
}
