"""Waits that end, and who is to blame when one does not end well.

A wait that has lasted for the time-out does not know yet whom to name: the rank that it waits for
may itself be waiting, for the one that died. So it calls the roll. Every rank on which some thread
waits answers; what is named is a rank that somebody waits for and that has not answered. Only if
all have answered is it the rank that was waited for: then they wait in a ring.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *

ABORT_BIT = -(1 << 63)
MOST_GRACE_NS = 1000000000


# ---- waiting -------------------------------------------------------------------------------------
# Who is awaited is any one of ``num`` ranks from ``peer`` on: one rank, or the replicas of a group,
# of which only the record itself says which one sends it.
def wait_for_flag(
    a: Args, flag: int, wanted: int, epoch: int, phase: int, peer: int, num: int
) -> bool:
    """Wait, in acquire order, until ``flag`` holds ``wanted`` or more. ``epoch``: of this launch.

    False: it timed out, or the group has given up; the host has been told, and the caller returns
    without touching peers again.
    """
    if load_acquire(flag) >= wanted:
        return True
    note_wait(flag, wanted)
    start = time_ns()
    spins = 0
    while True:
        spins += 1
        look = pause(spins)
        word = load_acquire(flag)
        came = word >= wanted
        late = came and too_late(a, start)
        if came and not late:
            note_waited(a, phase, peer, start)
            return True
        if (look or late) and gives_up(a, start, late, epoch, phase, peer, num, wanted, word):
            return False


def wait_for_count(a: Args, flag: int, epoch: int, phase: int, peer: int) -> int:
    """Wait for a word with the low half of ``epoch`` above a count; the count, -1 as above."""
    wanted = epoch & LOW_HALF
    word = load_acquire(flag)
    if word >> 32 & LOW_HALF == wanted:
        return word & LOW_HALF
    note_wait(flag, epoch)
    start = time_ns()
    spins = 0
    while True:
        spins += 1
        look = pause(spins)
        word = load_acquire(flag)
        seen = word >> 32 & LOW_HALF
        late = seen == wanted and too_late(a, start)
        if seen == wanted and not late:
            note_waited(a, phase, peer, start)
            return word & LOW_HALF
        if (look or late) and gives_up(a, start, late, epoch, phase, peer, 1, epoch, seen):
            return -1


def note_waited(a: Args, phase: int, peer: int, start: int) -> None:
    """For ``comm.stats()``."""
    atomic_add(a.local + LOC_STAT_WAIT_NS + 8 * (phase * NUM_RANKS + peer), time_ns() - start)


def too_late(a: Args, start: int) -> bool:
    """What came was waited for longer than the time-out, and the roll has been called."""
    return time_ns() - start > a.timeout_ns and load_relaxed(answered_word(a)) != 0


def gives_up(
    a: Args, start: int, late: bool, epoch: int, phase: int, peer: int, num: int,
    expected: int, seen: int,
) -> bool:  # fmt: skip
    """Whether a wait that began at ``start`` must end: without what it waits for, or too ``late``.
    Whoever calls the roll ends in a report."""
    if aborted(a, load_abort(a), epoch):
        return True
    answered = load_relaxed(answered_word(a))
    now = time_ns()
    if answered == 0:
        if now - start > a.timeout_ns or load_relaxed(roll_word(a.symmetric, 0)) != 0:
            answer_roll(a, now)
        return False
    culprit = -1 if late else missing(a, peer, num)
    grace = min(a.timeout_ns // 4, MOST_GRACE_NS)
    if culprit < 0:
        grace *= 2
    # A wait that began later gives its peer the same time to answer.
    if not late and now <= max(start, answered) + grace:
        return False
    report_timeout(a, phase, peer if culprit < 0 else culprit, epoch, expected, seen)
    return True


# ---- the roll ------------------------------------------------------------------------------------
def roll_word(base: int, i: int) -> int:
    """Word 0: somebody has called; word 1 + r: rank r has answered, or called."""
    return base + SYM_ROLL + 8 * i


def answered_word(a: Args) -> int:
    """When this rank answered; 0: it has not."""
    return a.local + LOC_CLAIM + 8 * CLAIM_ANSWERED


def answer_roll(a: Args, now: int) -> None:
    """Call the roll, or answer it: this rank is here, and waits. One thread of it tells all."""
    if compare_and_swap(answered_word(a), 0, now) != 0:
        return
    for r in range(NUM_RANKS):
        store_relaxed(roll_word(peer_base(a, r), 1 + a.rank), 1)
        store_relaxed(roll_word(peer_base(a, r), 0), 1)


def missing(a: Args, peer: int, num: int) -> int:
    """Who of those awaited has not answered; -1: all have."""
    for rank in range(peer, peer + num):
        if load_relaxed(roll_word(a.symmetric, 1 + rank)) == 0:
            return rank
    return -1


# ---- giving up -----------------------------------------------------------------------------------
def report_timeout(a: Args, phase: int, peer: int, epoch: int, expected: int, seen: int) -> None:
    """A peer did not come: tell the host, and every rank, so that all of them stop."""
    if not claim_status(a, STATUS_FAILURE, epoch):
        return
    report(a, STATUS_FAILURE, TIMEOUT, phase, a.rank, peer, epoch, expected, seen)
    for r in range(NUM_RANKS):
        store_release(peer_base(a, r) + SYM_ABORT, ABORT_BIT | phase << 32 | a.rank << 16 | peer)


def load_abort(a: Args) -> int:
    return load_relaxed(a.symmetric + SYM_ABORT)


def aborted(a: Args, abort: int, epoch: int) -> bool:
    """Whether some rank has given up (``abort`` is from ``load_abort``): tell the host who."""
    if abort == 0:
        return False
    if claim_status(a, STATUS_FAILURE, epoch):
        phase, reporter, peer = abort >> 32 & 0xFF, abort >> 16 & 0xFFFF, abort & 0xFFFF
        report(a, STATUS_FAILURE, ABORTED, phase, reporter, peer, epoch, epoch, 0)
    return True


# ---- the combine stages, and release -----------------------------------------------------------
def sent_epoch(a: Args) -> int:
    epoch = load_i64(sent_word(a))
    note_epoch(epoch)
    return epoch


def goes_on(a: Args, epoch: int) -> bool:
    """The whole block: whether there is something to combine. Not if the group has given up, or
    the step overflowed (everywhere)."""
    overflowed = CAPPED != 0 and load_i64(a.local + LOC_OVERFLOWED + 8 * a.slot) == epoch
    return all_threads(not overflowed and (thread_id() > 0 or not aborted(a, load_abort(a), epoch)))
