// Waits that end, and who is to blame when one does not end well.
//
// A wait that has lasted for the time-out does not know yet whom to name: the rank that it waits
// for may itself be waiting, for the one that died. So it calls the roll. Every rank on which some
// thread waits answers; what is named is a rank that somebody waits for and that has not answered.
// Only if all have answered is it the rank that was waited for: then they wait in a ring.
//   roll[0]      somebody has called
//   roll[1 + r]  rank r has answered (or called)
//   abort        the roll has ended: who is missing, and who says so
// Nothing of this is ever taken back: whoever calls the roll ends in a report, even if what it waits
// for comes at last.
#pragma once
#include "protocol.cuh"

#define MOST_GRACE_NS 1000000000ull

// Whom a thread waits for in which phase: any one of `num` ranks from `peer` on.
struct Awaited {
    u32 phase;
    u32 peer;
    u32 num;
};

DEVICE Awaited from_rank(u32 phase, u32 peer)
{
    Awaited who = {phase, peer, 1};
    return who;
}

// One of a group's replicas sends a record; which one, only the record itself says.
DEVICE Awaited from_group(u32 phase, u32 group)
{
    Awaited who = {phase, group * (u32)REPLICAS, (u32)REPLICAS};
    return who;
}

DEVICE u64* roll_word(u64 base, u32 i) { return reinterpret_cast<u64*>(base + SYM_ROLL) + i; }

// A remote rank that a mover serves is not asked, and given the benefit of the doubt: whoever is
// near it knows better.
DEVICE bool has_answered(const Args& a, u32 rank)
{
    return (REMOTE == 1 && is_remote(a, rank)) ||
           ld_relaxed_sys(roll_word(a.symmetric, 1 + rank)) != 0;
}

DEVICE bool roll_called(const Args& a) { return ld_relaxed_sys(roll_word(a.symmetric, 0)) != 0; }

// When this rank answered; 0: it has not.
DEVICE u64* answered_word(const Args& a) { return local_at<u64>(a, LOC_CLAIM, CLAIM_ANSWERED); }

// Calls the roll, or answers it: this rank is here, and waits. One thread of the rank tells all.
DEVICE void answer_roll(const Args& a, u64 now)
{
    if (cas_relaxed_sys(answered_word(a), 0, now) != 0) return;
    NO_UNROLL for (u32 r = 0; r < NUM_RANKS; ++r) {
        if (is_remote(a, r)) {
            if (REMOTE != 2) continue;
            put_word(a, r, roll_word(a.symmetric, 1 + a.rank), 1);
            put_word(a, r, roll_word(a.symmetric, 0), 1);
            continue;
        }
        st_relaxed_sys(roll_word(peer_base(a, r), 1 + a.rank), 1ull);
        st_relaxed_sys(roll_word(peer_base(a, r), 0), 1ull);
    }
}

// Who of those awaited has not answered; NUM_RANKS if all have.
DEVICE u32 missing(const Args& a, Awaited who)
{
    NO_UNROLL for (u32 i = 0; i < who.num; ++i)
        if (!has_answered(a, who.peer + i)) return who.peer + i;
    return (u32)NUM_RANKS;
}

// Whom to name where all those awaited have answered. A bounce: pull waits for remote ranks before the
// stage waits for any near it; one of these that is silent is what the remote ones wait for, too.
DEVICE u32 suspect(const Args& a, Awaited who)
{
    if (!BOUNCE || !is_remote(a, who.peer)) return who.peer;
    NO_UNROLL for (u32 r = 0; r < NUM_RANKS; ++r)
        if (!is_remote(a, r) && !has_answered(a, r)) return r;
    return who.peer;
}

DEVICE u64 abort_word(u32 phase, u32 reporter, u32 culprit)
{
    return 1ull << 63 | (u64)phase << 32 | reporter << 16 | culprit;
}

// A peer did not come: tell the host, and every rank, so that all of them stop.
DEVICE void report_timeout(const Args& a, u32 phase, u32 peer, u64 epoch, u64 expected, u64 seen)
{
    if (!claim_status(a, STATUS_FAILURE, epoch)) return;
    Status s = {CODE_TIMEOUT, phase, a.rank, peer, epoch, expected, seen, a.slot};
    report(a, STATUS_FAILURE, s);
    NO_UNROLL for (u32 r = 0; r < NUM_RANKS; ++r)
        if (!is_remote(a, r))
            st_release_sys(reinterpret_cast<u64*>(peer_base(a, r) + SYM_ABORT),
                           abort_word(phase, (u32)a.rank, peer));
    abort_remote(a, abort_word(phase, (u32)a.rank, peer));
}

DEVICE u64 load_abort(const Args& a)
{
    return ld_relaxed_sys(reinterpret_cast<u64*>(a.symmetric + SYM_ABORT));
}

// Whether the group has given up (`word` from load_abort). The communicator is of no more use.
DEVICE bool aborted(const Args& a, u64 word, u64 epoch)
{
    if (word == 0) return false;
    if (claim_status(a, STATUS_FAILURE, epoch)) {
        Status s = {CODE_ABORTED, word >> 32 & 0xff, word >> 16 & 0xffff, word & 0xffff, epoch, epoch,
                    0, a.slot};
        report(a, STATUS_FAILURE, s);
    }
    return true;
}

// What this thread has waited for since `start` came when its time was over and the roll called.
DEVICE bool too_late(const Args& a, u64 start)
{
    return global_timer_ns() - start > a.timeout_ns && ld_relaxed_sys(answered_word(a)) != 0;
}

// A thread that waits since `start` looks up, or knows that it is too late. True: it is to return;
// that is reported.
DEVICE bool given_up(const Args& a, u64 start, bool late, Awaited who, u64 epoch, u64 expected, u64 seen)
{
    if (aborted(a, REMOTE ? hear_abort(a) : load_abort(a), epoch)) return true;
    const u64 answered = ld_relaxed_sys(answered_word(a));
    const u64 now = global_timer_ns();
    if (answered == 0) {
        if (now - start > a.timeout_ns || roll_called(a)) answer_roll(a, now);
        return false;
    }
    const u32 culprit = late ? (u32)NUM_RANKS : missing(a, who);
    const u64 grace = (culprit == NUM_RANKS ? 2 : 1) * min(a.timeout_ns / 4, MOST_GRACE_NS);
    // A wait that began later gives its peer the same time to answer.
    if (!late && now <= max(start, answered) + grace) return false;
    report_timeout(a, who.phase, culprit == NUM_RANKS ? suspect(a, who) : culprit, epoch, expected, seen);
    return true;
}

struct FlagReached {  // a flag that holds an epoch
    u64 epoch;
    DEVICE bool operator()(u64 word) const { return word >= epoch; }
    DEVICE u64 seen(u64 word) const { return word; }
};

struct CountArrived {  // a count word of this very epoch
    u64 epoch;
    DEVICE bool operator()(u64 word) const { return count_epoch(word) == (u32)epoch; }
    DEVICE u64 seen(u64 word) const { return count_epoch(word); }
};

// Waits until `done` holds for the word at `flag`, with acquire order. False: it timed out or the
// group has given up; that is reported, and the caller returns without touching peers again.
// `expected` is what the host is told the wait was for.
// `*last` is the word that was seen last.
template <class Done>
DEVICE bool wait_for(const Args& a, const u64* flag, Done done, u64 expected, u64 epoch, Awaited who,
                     u64* last)
{
    u64 word = ld_acquire_sys(flag);
    *last = word;
    if (done(word)) return true;
    note_wait(flag, expected);
    const u64 start = global_timer_ns();
    for (u32 spins = 1;; ++spins) {
        const bool look = poll_pause(spins);
        word = ld_acquire_sys(flag);
        *last = word;
        const bool came = done(word), late = came && too_late(a, start);
        if (came && !late) {
            atomicAdd(local_at<u64>(a, LOC_STAT_WAIT_NS, who.phase * NUM_RANKS + who.peer),
                      global_timer_ns() - start);
            return true;
        }
        if ((look || late) && given_up(a, start, late, who, epoch, expected, done.seen(word)))
            return false;
    }
}

// One thread waits for a flag that holds an epoch.
DEVICE bool wait_flag(const Args& a, const u64* flag, u64 epoch, Awaited who)
{
    u64 last;
    return wait_for(a, flag, FlagReached{epoch}, epoch, epoch, who, &last);
}

// A warp's lanes wait for a flag each, those that are `pending`; returns which of them have come, one
// at least. 0 as false in wait_for.
DEVICE u32 wait_any(const Args& a, const u64* flag, bool pending, u64 epoch, Awaited who)
{
    u64 word = pending ? ld_acquire_sys(flag) : 0;
    u32 come = __ballot_sync(FULL_WARP, pending && word >= epoch);
    if (come) return come;
    if (pending) note_wait(flag, epoch);
    const u64 start = global_timer_ns();
    for (u32 spins = 1;; ++spins) {
        const bool look = poll_rarely(spins);
        if (pending) word = ld_acquire_sys(flag);
        come = __ballot_sync(FULL_WARP, pending && word >= epoch);
        const u32 first = (u32)__ffs(__ballot_sync(FULL_WARP, pending)) - 1;
        const bool late =
            come && __any_sync(FULL_WARP, spins >= FIRST_LOOK && lane_id() == first && too_late(a, start));
        if (come && !late) {
            if (pending && word >= epoch)
                atomicAdd(local_at<u64>(a, LOC_STAT_WAIT_NS, who.phase * NUM_RANKS + who.peer),
                          global_timer_ns() - start);
            return come;
        }
        if (!look && !late) continue;
        const bool over = lane_id() == first && given_up(a, start, late, who, epoch, epoch, word);
        if (__any_sync(FULL_WARP, over)) return 0;
    }
}

// Begins a combine stage. False if there is nothing to do: the group has given up, or the step
// overflowed everywhere. Threads may differ in what they see of the former.
DEVICE bool begin_combine(const Args& a, u64* epoch)
{
    const u64 abort = load_abort(a);
    *epoch = ld(sent_word(a));
    note_epoch(*epoch);
    const bool overflowed = CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == *epoch;
    return !overflowed && !aborted(a, abort, *epoch);
}
