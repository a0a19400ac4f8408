"""Credits: how ranks keep their peers' completion queues from overrunning.

A NIC has room for ``rx_depth`` arrivals that have not been polled. A completion does not say whom
it is from (EFA's do not), so the receiver counts them all together, and senders say how much they
have sent. Each NIC of each rank has a row for each peer, in memory that the peer writes to:

* ``announced``: arrivals that the peer has caused here, ever;
* ``granted``: arrivals that this rank may cause there, ever.

A peer starts with ``window = rx_depth // num_peers``. It announces every half window, and when it
must stop. The receiver grants up to a window beyond what was announced, as long as the sum of all
grants stays within what it has polled plus ``rx_depth``. Hence

* arrivals not yet polled <= granted - polled <= ``rx_depth``, whoever sends how much;
* nobody stops for good: a peer that has used up its grant has announced all of it, the others hold
  at most a window beyond what they have sent, and once everything sent has been polled there is a
  window left for it.

Both words go in one plain write of 16 bytes, which causes no arrival itself. Only one is under way
per channel, so that an old one cannot overtake a new one.
"""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.jit import cold, flat
from moecomm.transport.engine.lines import channel_at, owe
from moecomm.transport.engine.native import (
    ld32,
    ld64,
    ld64_acquire,
    st8,
    st16,
    st32,
    st64,
    unlikely,
)
from moecomm.transport.engine.posting import add_to_batch, make_room, may_post, next_place


@flat
def serve_credits(engine):
    """Post the credit writes that are owed, as far as queues have room."""
    owed = ld64(engine + S.CONTROL_TAIL) - ld64(engine + S.CONTROL_HEAD)
    if unlikely(owed > 0):
        _serve(engine, owed)


@cold
def _serve(engine, owed):
    head = ld64(engine + S.CONTROL_HEAD)
    for turn in range(owed):
        place = (head + turn) & (ld64(engine + S.ACTIVE_SIZE) - 1)
        index = ld32(ld64(engine + S.CONTROL_QUEUE) + place * 4)
        st64(engine + S.CONTROL_HEAD, head + turn + 1)
        st64(channel_at(engine, index) + S.CH_OWES, 0)
        _write_credits(engine, index)


@cold
def _write_credits(engine, index):
    channel = channel_at(engine, index)
    nic = ld64(channel + S.CH_NIC)
    sent, granted = ld64(channel + S.CH_SENT), ld64(channel + S.CH_GRANTED)
    news = sent != ld64(channel + S.CH_ANNOUNCED) or granted != ld64(channel + S.CH_TOLD_GRANT)
    if not news or ld64(channel + S.CH_BUSY) != 0 or ld64(channel + S.CH_CODE) != 0:
        return  # a write under way looks again when it is done
    make_room(engine, nic)
    if not may_post(nic, channel):
        owe(engine, index)
        return
    row = ld64(channel + S.CH_ROW)
    st64(row + S.ROW_MY_ANNOUNCED, sent)
    st64(row + S.ROW_MY_GRANTED, granted)
    st64(channel + S.CH_ANNOUNCED, sent)
    st64(channel + S.CH_TOLD_GRANT, granted)
    st64(channel + S.CH_BUSY, 1)
    post, peers = next_place(nic), ld64(engine + S.NUM_PEERS)
    st32(post + R.POST_PEER, index % peers)
    st16(post + R.POST_NIC, index // peers)
    st8(post + R.POST_KIND, R.WRITE)
    st8(post + R.POST_FLAGS, 0)
    st64(post + R.POST_LOCAL, row + S.ROW_MY_ANNOUNCED)
    st64(post + R.POST_LOCAL_KEY, ld64(nic + S.NIC_CONTROL_KEY))
    st64(post + R.POST_NBYTES, 16)
    st64(post + R.POST_REMOTE, ld64(channel + S.CH_REMOTE_ROW) + S.ROW_ANNOUNCED)
    st64(post + R.POST_REMOTE_KEY, ld64(channel + S.CH_REMOTE_KEY))
    add_to_batch(engine, nic, channel, index, post, 0, S.SLOT_CONTROL)
    st64(engine + S.CREDIT_WRITES, ld64(engine + S.CREDIT_WRITES) + 1)
    st64(engine + S.IDLE, S.BUSY)


@cold
def grant(engine, nic):
    """Look at what the peers have announced, and grant what there is room for."""
    peers = ld64(engine + S.NUM_PEERS)
    arrivals, window = ld64(nic + S.NIC_ARRIVALS), ld64(nic + S.NIC_WINDOW)
    total = ld64(nic + S.NIC_GRANTED)
    room = arrivals + ld64(nic + S.NIC_RX_DEPTH) - total
    first = ld64(nic + S.NIC_INDEX) * peers
    index = first + arrivals % peers  # nobody is always the last
    for _ in range(peers):
        if room <= 0:
            break
        index += 1
        if index == first + peers:
            index = first
        channel = channel_at(engine, index)
        granted = ld64(channel + S.CH_GRANTED)
        announced = ld64_acquire(ld64(channel + S.CH_ROW) + S.ROW_ANNOUNCED)
        wanted = announced + window - granted
        if wanted >= (window + 1) >> 1:
            given = min(wanted, room)
            st64(channel + S.CH_GRANTED, granted + given)
            total += given
            room -= given
            owe(engine, index)
    st64(nic + S.NIC_GRANTED, total)
    st64(nic + S.NIC_SCAN_AT, arrivals + (window >> 1))
