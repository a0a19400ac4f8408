// Waiting for what a mover, or a remote peer, says has arrived.
#pragma once
#include "waits.cuh"

// proxied: `arrived` is memory of the host. One thread polls a word and passes it on to the others.
DEVICE u64* relay_word(const Args& a, u64 source, u32 channel)
{
    return local_at<u64>(a, LOC_RELAY, channel_number(a, source, channel));
}

DEVICE bool relayed(const Args& a, u64 source, u32 channel, u64 wanted, u64 epoch, u32 phase)
{
    u64 last;
    const FlagReached reached = {wanted};
    u64* copy = relay_word(a, source, channel);
    if (ld_acquire_sys(copy) >= wanted) return true;
    u64* claim = local_at<u64>(a, LOC_RELAY_CLAIM, channel_number(a, source, channel));
    if (atomicMax(claim, wanted) >= wanted)
        return wait_for(a, copy, reached, wanted, epoch, from_rank(phase, (u32)source), &last);
    const u64* word = arrived_word(a, source, channel);
    if (!wait_for(a, word, reached, wanted, epoch, from_rank(phase, (u32)source), &last)) return false;
    st_release_sys(copy, wanted);
    return true;
}

// A bounce: pull has brought what this half takes of epoch `wanted`. It runs ahead of this kernel, waits
// for the peers, knows whom to name and gives up for all: so there is no clock here. False: it has.
DEVICE bool wait_pulled(const Args& a, u32 half, u64 wanted, u64 epoch)
{
    const u64* word = pulled_word(a, half);
    if (ld_acquire_sys(word) >= wanted) return true;
    note_wait(word, wanted);
    for (u32 spins = 1;; ++spins) {
        const bool look = poll_pause(spins);
        if (ld_acquire_sys(word) >= wanted) return true;
        if (look && aborted(a, load_abort(a), epoch)) return false;
    }
}

// One thread: `channel` of the remote rank `source` has reached epoch `wanted`, and what came with
// it may be read. False: as wait_for.
DEVICE bool wait_arrived(const Args& a, u64 source, u32 channel, u64 wanted, u64 epoch, u32 phase)
{
    if (BOUNCE && channel != CHANNEL_ACK)
        return wait_pulled(a, channel == CHANNEL_ROWS ? HALF_COMBINE : HALF_DISPATCH, wanted, epoch);
    if (REMOTE == 1) return relayed(a, source, channel, wanted, epoch, phase);
    u64 last;
    u64* word = arrived_word(a, source, channel);
    if (!wait_for(a, word, FlagReached{wanted}, wanted, epoch, from_rank(phase, (u32)source), &last))
        return false;
    after_arrival(a, source);
    return true;
}

// The last epoch that remote rank r is known to have read, without waiting for news.
DEVICE u64 known_ack(const Args& a, u64 r)
{
    if (REMOTE == 2) return ld_acquire_sys(arrived_word(a, r, CHANNEL_ACK));
    const u64 rows = ld_acquire_sys(relay_word(a, r, CHANNEL_ROWS));
    return max(rows, ld_acquire_sys(relay_word(a, r, CHANNEL_ACK)));
}

// A word of the head of remote rank `source`.
DEVICE bool wait_remote_head(const Args& a, u64 source, u64 word, u64 epoch, u64* found)
{
    if (!wait_arrived(a, source, CHANNEL_HEAD, epoch, epoch, PHASE_DISPATCH_RECV)) return false;
    *found = ld(in_head(a, source) + word);
    return true;
}
