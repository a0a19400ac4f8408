"""From command to post: credits, batches, refusals, and channels that end. Nothing here waits."""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import piece_done
from moecomm.transport.engine.ends import end_channel
from moecomm.transport.engine.jit import cold, flat, inner
from moecomm.transport.engine.lines import (
    activate,
    causes_arrival,
    channel_at,
    copy_post,
    free_slot,
    is_closed_to,
    leave_line,
    owe,
    place_at,
    slot_at,
    stand_first,
)
from moecomm.transport.engine.native import (
    c_function,
    ld32,
    ld64,
    ld64_acquire,
    st32,
    st64,
    unlikely,
)
from moecomm.transport.engine.provider import MAX_BURST

_c_post = c_function("i64", "i64", "i64", "i64")
_PATIENCE = 16  # turns that a refused post holds up the ones behind it


@flat
def has_room(nic, channel):
    """Whether batch and queues have room, as far as the engine counts."""
    return (
        ld64(nic + S.NIC_BATCH_COUNT) < MAX_BURST
        and ld64(nic + S.NIC_FREE_TAIL) != ld64(nic + S.NIC_FREE_HEAD)
        and ld64(channel + S.CH_IN_FLIGHT) < ld64(nic + S.NIC_PEER_DEPTH)
    )


@flat
def may_post(nic, channel):
    """Whether there is room, and the channel may use it."""
    slow = ld64(channel + S.CH_SLOW) != 0
    return has_room(nic, channel) and not (slow and ld64(channel + S.CH_IN_FLIGHT) > 0)


@flat
def has_places(engine):
    """Whether a command may be taken: a whole batch of each NIC may yet be put back."""
    return ld64(engine + S.WAITING_COUNT) > ld64(engine + S.WAITING_KEPT)


@flat
def next_place(nic):
    """Where the next post of the batch goes, if there is room in it."""
    return ld64(nic + S.NIC_BATCH) + ld64(nic + S.NIC_BATCH_COUNT) * R.POST_BYTES


@flat
def add_to_batch(engine, nic, channel, index, post, op, kind):
    """Give the post in ``next_place`` its slot; there is room for both."""
    head = ld64(nic + S.NIC_FREE_HEAD)
    st64(nic + S.NIC_FREE_HEAD, head + 1)
    slot = ld32(ld64(nic + S.NIC_FREE) + (head & ld64(nic + S.NIC_FREE_MASK)) * 4)
    record = slot_at(nic, slot)
    st32(record + S.SLOT_STATE, kind)
    st32(record + S.SLOT_OP, op)
    st32(record + S.SLOT_CHANNEL, index)
    in_flight = ld64(channel + S.CH_IN_FLIGHT)
    if in_flight == 0 and ld64(channel + S.CH_FIRST) == 0:
        st64(channel + S.CH_SINCE, ld64(engine + S.NOW))
    st64(channel + S.CH_IN_FLIGHT, in_flight + 1)
    st32(post + R.POST_CONTEXT, slot)
    st64(nic + S.NIC_BATCH_COUNT, ld64(nic + S.NIC_BATCH_COUNT) + 1)


@inner
def make_room(engine, nic):
    """Flush a full batch. What is put back may change any line: call it before looking at one."""
    if unlikely(ld64(nic + S.NIC_BATCH_COUNT) >= MAX_BURST):
        flush(engine, nic)


@flat
def use_credit(engine, nic, channel, index):
    """Cause one more arrival at the peer; whether it has granted that."""
    sent = ld64(channel + S.CH_SENT)
    if unlikely(sent >= ld64_acquire(ld64(channel + S.CH_ROW) + S.ROW_GRANTED)):
        owe(engine, index)  # tell the peer of all, so that it can grant more
        return False
    st64(channel + S.CH_SENT, sent + 1)
    if unlikely(sent + 1 - ld64(channel + S.CH_ANNOUNCED) >= ld64(nic + S.NIC_HALF)):
        owe(engine, index)
    return True


@flat
def admit(engine, nic, channel, index, command):
    """Post the command with the next batch if queues and credits allow; whether they do."""
    if not may_post(nic, channel) or is_closed_to(channel, command):
        return False
    if causes_arrival(command) and not use_credit(engine, nic, channel, index):
        return False
    post, op = next_place(nic), ld32(command + R.POST_CONTEXT)
    copy_post(post, command)
    add_to_batch(engine, nic, channel, index, post, op, S.SLOT_USER)
    return True


@flat
def serve_lines(engine, limit):
    """Post from the lines of up to ``limit`` channels."""
    waiting = ld64(engine + S.ACTIVE_TAIL) - ld64(engine + S.ACTIVE_HEAD)
    if unlikely(waiting > 0):
        _serve(engine, min(waiting, limit))


@cold
def _serve(engine, count):
    head = ld64(engine + S.ACTIVE_HEAD)
    for turn in range(count):
        place = (head + turn) & (ld64(engine + S.ACTIVE_SIZE) - 1)
        index = ld32(ld64(engine + S.ACTIVE) + place * 4)
        st64(engine + S.ACTIVE_HEAD, head + turn + 1)
        channel = channel_at(engine, index)
        nic = ld64(channel + S.CH_NIC)
        st64(channel + S.CH_IS_ACTIVE, 0)
        burst = 0
        while burst < MAX_BURST:
            make_room(engine, nic)
            first = ld64(channel + S.CH_FIRST)
            if first == 0 or not admit(engine, nic, channel, index, place_at(engine, first)):
                break
            leave_line(engine, channel)
            st64(engine + S.IDLE, S.BUSY)
            burst += 1
        if ld64(channel + S.CH_FIRST) != 0:
            activate(engine, index)


# ---- Batches ------------------------------------------------------------------------------------


@flat
def flush(engine, nic):
    """Hand the batch to the NIC; what it does not take stays for the next turn."""
    count = ld64(nic + S.NIC_BATCH_COUNT)
    if count > 0 and ld64(nic + S.NIC_FULL) != ld64(engine + S.TURNS):
        accepted = _post(engine, nic, ld64(nic + S.NIC_BATCH), count)
        if unlikely(accepted != count):
            _was_refused(engine, nic, accepted)
        else:
            st64(nic + S.NIC_STUCK, 0)
            st64(nic + S.NIC_BATCH_COUNT, 0)


@flat
def _post(engine, nic, first, count):
    """What the provider says."""
    accepted = _c_post(ld64(nic + S.NIC_POST), ld64(nic + S.NIC_STATE), first, count)
    st64(engine + S.POSTED, ld64(engine + S.POSTED) + max(accepted, 0))
    return accepted


@cold
def _was_refused(engine, nic, accepted):
    """What ``flush`` does with a batch of which the provider took that many, or said why not.

    A full queue and a peer that cannot take anything look alike. Most refusals are full queues,
    and soon over. A post that is refused turn after turn goes back to its channel's line, so that
    others get past it, and the channel may try one post at a time until it completes something.
    """
    left = ld64(nic + S.NIC_BATCH_COUNT)
    batch = first = ld64(nic + S.NIC_BATCH)
    while True:
        if accepted < 0:
            _refused_for_good(engine, nic, ld32(first + R.POST_CONTEXT), -accepted)
            first, left = first + R.POST_BYTES, left - 1
        else:
            first, left = first + accepted * R.POST_BYTES, left - accepted
            if accepted > 0:
                st64(nic + S.NIC_STUCK, 0)
            if left > 0:
                st64(engine + S.REFUSED, ld64(engine + S.REFUSED) + 1)
                index = ld32(slot_at(nic, ld32(first + R.POST_CONTEXT)) + S.SLOT_CHANNEL)
                if not _gets_past(engine, nic, index):
                    break
                left = _withdraw(engine, nic, first, left, index)
        if left == 0:
            break
        accepted = _post(engine, nic, first, left)
    if left > 0:
        st64(nic + S.NIC_FULL, ld64(engine + S.TURNS))
        for n in range(left if first != batch else 0):
            copy_post(batch + n * R.POST_BYTES, first + n * R.POST_BYTES)
    st64(nic + S.NIC_BATCH_COUNT, left)


@cold
def _gets_past(engine, nic, index):
    """Whether the posts behind one that was refused are tried now; then its channel is slow."""
    channel = channel_at(engine, index)
    if ld64(channel + S.CH_SLOW) == 0:
        stuck = ld64(nic + S.NIC_STUCK) + 1
        st64(nic + S.NIC_STUCK, stuck)
        if stuck < _PATIENCE:
            return False
        st64(nic + S.NIC_STUCK, 0)
        st64(channel + S.CH_SLOW, 1)
    return True


@cold
def _withdraw(engine, nic, batch, count, index):
    """Put a channel's posts of a batch back into its line; how many others are left."""
    for back in range(count):
        post = batch + (count - 1 - back) * R.POST_BYTES
        st64(post + R.POST_SEQUENCE, 0)
        if ld32(slot_at(nic, ld32(post + R.POST_CONTEXT)) + S.SLOT_CHANNEL) == index:
            st64(post + R.POST_SEQUENCE, -1)
            _put_back(engine, nic, post)
    kept = 0
    for n in range(count):
        post = batch + n * R.POST_BYTES
        if ld64(post + R.POST_SEQUENCE) == 0:
            copy_post(batch + kept * R.POST_BYTES, post)
            kept += 1
    return kept


@cold
def withdraw(engine, index):
    """Put what a channel has in its NIC's batch back into its line."""
    nic = ld64(channel_at(engine, index) + S.CH_NIC)
    count, batch = ld64(nic + S.NIC_BATCH_COUNT), ld64(nic + S.NIC_BATCH)
    st64(nic + S.NIC_BATCH_COUNT, _withdraw(engine, nic, batch, count, index))


@cold
def _put_back(engine, nic, post):
    slot = ld32(post + R.POST_CONTEXT)
    record = slot_at(nic, slot)
    index, op, kind = (
        ld32(record + S.SLOT_CHANNEL),
        ld32(record + S.SLOT_OP),
        ld32(record + S.SLOT_STATE),
    )
    channel = channel_at(engine, index)
    free_slot(nic, slot)
    st64(channel + S.CH_IN_FLIGHT, ld64(channel + S.CH_IN_FLIGHT) - 1)
    if kind == S.SLOT_CONTROL:
        st64(channel + S.CH_BUSY, 0)
        st64(channel + S.CH_TOLD_GRANT, -1)  # what it said is news again
        owe(engine, index)
        return
    if causes_arrival(post):
        st64(channel + S.CH_SENT, ld64(channel + S.CH_SENT) - 1)
    if is_closed_to(channel, post):
        piece_done(engine, op, S.PEER_FAILED, ld64(channel + S.CH_CODE), index)
        return
    st32(post + R.POST_CONTEXT, op)
    stand_first(engine, index, post)


@cold
def _refused_for_good(engine, nic, slot, code):
    record = slot_at(nic, slot)
    index = ld32(record + S.SLOT_CHANNEL)
    channel = channel_at(engine, index)
    st64(channel + S.CH_IN_FLIGHT, ld64(channel + S.CH_IN_FLIGHT) - 1)
    if ld32(record + S.SLOT_STATE) == S.SLOT_USER:
        piece_done(engine, ld32(record + S.SLOT_OP), code, 0, index)
    free_slot(nic, slot)
    end_channel(engine, index, code, 0)
