"""A network without a library: libfabric's five hot functions as compiled numba functions.

The engine's loop and the hooks of ``moecomm.transport.efa.hot`` run on it unchanged: they call
addresses. Ranks are threads of one process, and all of it is misbehaviour on demand: any order,
delays, full queues, failing completions, repeated ones and repeated arrivals, silent and
unreachable peers, a broken NIC, refused registrations. It also checks what providers are promised:
keys and bounds of every write, ``tx_depth``, ``rx_depth``, and contexts that belong to one post at
a time.

The words of a NIC's state may be changed while it runs (``FakeNic.set``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from moecomm.errors import TransportError, TransportUnavailable
from moecomm.transport.base import Region
from moecomm.transport.efa import abi as A
from moecomm.transport.efa import hot
from moecomm.transport.efa.posting_state import Functions, PostingState
from moecomm.transport.engine.blocks import Block, c_address
from moecomm.transport.engine.jit import hook, inner
from moecomm.transport.engine.native import (
    c_function,
    ld32,
    ld64,
    ld64_acquire,
    st32,
    st64,
    st64_release,
)
from moecomm.transport.engine.provider import Hooks, Limits, Registration, Sizing

MAX_PENDING: Final = 256
MAX_COMPLETIONS: Final = 1024
MAX_REGIONS: Final = 256
RING: Final = 4096  # arrivals from one sender
SENDS: Final = 16  # messages from one sender
SEND_BYTES: Final = 512

# Words of a NIC's state.
PEER_STATES: Final = 0  # table of the states of all ranks' NICs
NUM_PEERS: Final = 8
RANK: Final = 16
DEPTH: Final = 24  # posts that it takes
RX_DEPTH: Final = 32
RANDOM: Final = 40
MEMCPY: Final = 48
REORDER: Final = 56  # 1: completes posts in any order
DELAY: Final = 64  # one in so many polls completes something; 0, 1: every one
REFUSE: Final = 72  # one in so many posts meets a full queue
FAIL: Final = 80  # so many of the next posts fail
TWICE: Final = 88  # one in so many completions is reported twice
SILENT: Final = 96  # mask of peers to whom nothing arrives and nothing completes
UNREACHABLE: Final = 104  # mask of peers to whom every post gives EAGAIN
BROKEN: Final = 112  # an error number: the completion queue gives it
REFUSED: Final = 120  # an error number: every post gives it
PENDING: Final = 128  # count
COMPLETIONS: Final = 136  # count
ERRORS: Final = 144  # count
RECEIVES: Final = 152  # posted receives, count
# Promises that were broken, counted.
OVERRUNS: Final = 160  # arrivals beyond RX_DEPTH
BAD_CONTEXTS: Final = 168
NO_RECEIVE: Final = 176
MOST_IN_FLIGHT: Final = 184
POSTS: Final = 192
LATE_RECEIVES: Final = 200  # 1: the last receive met a full queue and is to be tried again
SHAKES_HANDS: Final = 208  # 1: posts to a peer give EAGAIN until both have polled since the first
POLLS: Final = 216
HANDSHAKES: Final = 224  # posts refused for want of one
ARRIVE_TWICE: Final = 232  # one in so many arrivals is reported twice
KNOCKED_AT: Final = 256  # for each peer: its count of polls at the first post to it, and own ones
MAX_SHAKING: Final = 16
PENDING_AT: Final = KNOCKED_AT + MAX_SHAKING * 16
PENDING_BYTES: Final = 72
COMPLETIONS_AT: Final = PENDING_AT + MAX_PENDING * PENDING_BYTES
ERRORS_AT: Final = COMPLETIONS_AT + MAX_COMPLETIONS * 16
RECEIVES_AT: Final = ERRORS_AT + MAX_PENDING * 16
REGIONS_AT: Final = RECEIVES_AT + MAX_PENDING * 16
INBOXES_AT: Final = REGIONS_AT + MAX_REGIONS * 24
# An inbox: tail, head, ring of data words, then the same for messages. BUSY: 1 while its sender
# looks at the regions here and writes to one of them.
INBOX_TAIL: Final = 0
INBOX_BUSY: Final = 8
INBOX_HEAD: Final = 64
INBOX_RING: Final = 128
SEND_TAIL: Final = INBOX_RING + RING * 8
SEND_HEAD: Final = SEND_TAIL + 64
SEND_RING: Final = SEND_HEAD + 64
INBOX_BYTES: Final = SEND_RING + SENDS * (SEND_BYTES + 8)

_copy = c_function("i64", "i64", "i64", "i64")


@inner
def _random(nic, bound):
    x = ld64(nic + RANDOM)
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    st64(nic + RANDOM, x)
    return (x & ((1 << 62) - 1)) % bound


@inner
def _one_in(nic, word):
    often = ld64(nic + word)
    return often > 0 and _random(nic, often) == 0


@inner
def _inbox(nic, sender):
    return nic + INBOXES_AT + sender * INBOX_BYTES


@inner
def _count(nic, word):
    st64(nic + word, ld64(nic + word) + 1)


@inner
def _shakes_hands(nic, peer):
    """Whether the handshake with a peer, which the first post to it begins, is still under way:
    it gets on whenever one of both polls, as with the provider "efa"."""
    target = ld64(ld64(nic + PEER_STATES) + peer * 8)
    place = nic + KNOCKED_AT + peer * 16
    theirs, mine = ld64_acquire(target + POLLS), ld64(nic + POLLS)
    if ld64(place) == 0:
        st64(place, theirs + 1)
        st64(place + 8, mine + 1)
    return theirs <= ld64(place) or mine <= ld64(place + 8)


@inner
def _post(nic, message, peer, flags, is_send):
    pending = ld64(nic + PENDING)
    if ld64(nic + REFUSED) != 0:
        return -ld64(nic + REFUSED)
    if (ld64(nic + UNREACHABLE) >> peer) & 1 or _one_in(nic, REFUSE):
        return -A.FI_EAGAIN
    if ld64(nic + SHAKES_HANDS) and _shakes_hands(nic, peer):
        _count(nic, HANDSHAKES)
        return -A.FI_EAGAIN
    if pending >= ld64(nic + DEPTH):
        return -A.FI_EAGAIN
    context = ld64(message + (A.MSG_CONTEXT if is_send else A.MSG_RMA_CONTEXT))
    for n in range(pending):
        if ld64(nic + PENDING_AT + n * PENDING_BYTES) == context:
            _count(nic, BAD_CONTEXTS)
    entry = nic + PENDING_AT + pending * PENDING_BYTES
    iov = ld64(message)
    st64(entry, context)
    st64(entry + 8, flags)
    st64(entry + 16, peer)
    st64(entry + 24, ld64(iov + A.IOV_BASE))
    st64(entry + 32, ld64(iov + A.IOV_LEN))
    st64(entry + 64, is_send)
    if not is_send:
        remote = ld64(message + A.MSG_RMA_RMA_IOV)
        st64(entry + 40, ld64(remote + A.RMA_IOV_ADDR))
        st64(entry + 48, ld64(remote + A.RMA_IOV_KEY))
        st64(entry + 56, ld64(message + A.MSG_RMA_DATA))
    st64(nic + PENDING, pending + 1)
    st64(nic + MOST_IN_FLIGHT, max(ld64(nic + MOST_IN_FLIGHT), pending + 1))
    _count(nic, POSTS)
    return 0


@hook("int64(int64, int64, int64)")
def WRITEMSG(nic, message, flags):
    return _post(nic, message, ld64(message + A.MSG_RMA_ADDR), flags, 0)


@hook("int64(int64, int64, int64)")
def SENDMSG(nic, message, flags):
    return _post(nic, message, ld64(message + A.MSG_ADDR), flags, 1)


@hook("int64(int64, int64, int64)")
def RECVMSG(nic, message, flags):
    count = ld64(nic + RECEIVES)
    if count >= MAX_PENDING or _one_in(nic, REFUSE):
        st64(nic + LATE_RECEIVES, 1)
        return -A.FI_EAGAIN
    st64(nic + LATE_RECEIVES, 0)
    place = nic + RECEIVES_AT + count * 16
    st64(place, ld64(message + A.MSG_CONTEXT))
    st64(place + 8, ld64(ld64(message + A.MSG_IOV) + A.IOV_BASE))
    st64(nic + RECEIVES, count + 1)
    return 0


@inner
def _allowed(target, address, nbytes, key):
    """Whether ``key`` lets somebody write there."""
    for n in range(MAX_REGIONS):
        region = target + REGIONS_AT + n * 24
        if ld64_acquire(region) == key and key != 0:
            start = ld64(region + 8)
            return address >= start and address + nbytes <= start + ld64(region + 16)
    return False


@inner
def _complete(nic, context):
    count = ld64(nic + COMPLETIONS)
    st64(nic + COMPLETIONS_AT + count * 16, context)
    st64(nic + COMPLETIONS, count + 1)


@inner
def _fail(nic, context, code, detail):
    count = ld64(nic + ERRORS)
    place = nic + ERRORS_AT + count * 16
    st64(place, context)
    st32(place + 8, code)
    st32(place + 12, detail)
    st64(nic + ERRORS, count + 1)


@inner
def _write(nic, entry, target, inbox):
    """1: done; 0: there is no room for its immediate; below 0: it is not allowed."""
    address, nbytes = ld64(entry + 40), ld64(entry + 32)
    if not _allowed(target, address, nbytes, ld64(entry + 48)):
        return -1
    tail = ld64(inbox + INBOX_TAIL)
    if tail - ld64_acquire(inbox + INBOX_HEAD) >= RING:
        return 0
    _copy(ld64(nic + MEMCPY), address, ld64(entry + 24), nbytes)
    if ld64(entry + 8) & A.FI_REMOTE_CQ_DATA:
        st64(inbox + INBOX_RING + (tail % RING) * 8, ld64(entry + 56))
        st64_release(inbox + INBOX_TAIL, tail + 1)
    return 1


@inner
def _deliver(nic, entry):
    """Do what a post asks for; whether there was room on the other side."""
    peer, nbytes, source = ld64(entry + 16), ld64(entry + 32), ld64(entry + 24)
    target = ld64(ld64(nic + PEER_STATES) + peer * 8)
    inbox = _inbox(target, ld64(nic + RANK))
    if ld64(nic + FAIL) > 0:
        st64(nic + FAIL, ld64(nic + FAIL) - 1)
        _fail(nic, ld64(entry), 5, 77)
        return True
    if ld64(entry + 64) != 0:
        tail = ld64(inbox + SEND_TAIL)
        if tail - ld64_acquire(inbox + SEND_HEAD) >= SENDS:
            return False
        place = inbox + SEND_RING + (tail % SENDS) * (SEND_BYTES + 8)
        st64(place, nbytes)
        _copy(ld64(nic + MEMCPY), place + 8, source, nbytes)
        st64_release(inbox + SEND_TAIL, tail + 1)
    else:
        st64_release(inbox + INBOX_BUSY, 1)
        wrote = _write(nic, entry, target, inbox)
        st64_release(inbox + INBOX_BUSY, 0)
        if wrote < 0:
            _fail(nic, ld64(entry), 5, 10)
            return True
        if wrote == 0:
            return False
    _complete(nic, ld64(entry))
    if _one_in(nic, TWICE):
        _complete(nic, ld64(entry))
    return True


@inner
def _work(nic):
    """Carry out some of what is pending."""
    delay = ld64(nic + DELAY)
    if delay > 1 and _random(nic, delay) != 0:
        return
    skipped = 0
    for _ in range(min(ld64(nic + PENDING), 8)):
        pending = ld64(nic + PENDING)
        if ld64(nic + ERRORS) + ld64(nic + COMPLETIONS) > MAX_PENDING - 8:
            return
        which = _random(nic, pending) if ld64(nic + REORDER) else skipped
        entry = nic + PENDING_AT + which * PENDING_BYTES
        if (ld64(nic + SILENT) >> ld64(entry + 16)) & 1 or not _deliver(nic, entry):
            skipped += 1  # the others have their turn
            continue
        for word in range((pending - 1 - which) * PENDING_BYTES // 8):
            st64(entry + word * 8, ld64(entry + PENDING_BYTES + word * 8))
        st64(nic + PENDING, pending - 1)


@inner
def _entry(buffer, n, context, flags, nbytes, data):
    entry = buffer + n * A.CQ_ENTRY_BYTES
    st64(entry + A.CQ_ENTRY_CONTEXT, context)
    st64(entry + A.CQ_ENTRY_FLAGS, flags)
    st64(entry + A.CQ_ENTRY_LEN, nbytes)
    st64(entry + A.CQ_ENTRY_DATA, data)


@inner
def _take_sends(nic, buffer, filled, wanted):
    for sender in range(ld64(nic + NUM_PEERS)):
        inbox = _inbox(nic, sender)
        while filled < wanted and ld64(inbox + SEND_HEAD) < ld64_acquire(inbox + SEND_TAIL):
            receives = ld64(nic + RECEIVES)
            if receives == 0:
                if ld64(nic + LATE_RECEIVES) == 0:
                    _count(nic, NO_RECEIVE)
                return filled
            head = ld64(inbox + SEND_HEAD)
            place = inbox + SEND_RING + (head % SENDS) * (SEND_BYTES + 8)
            receive = nic + RECEIVES_AT + (receives - 1) * 16
            nbytes = ld64(place)
            _copy(ld64(nic + MEMCPY), ld64(receive + 8), place + 8, nbytes)
            _entry(buffer, filled, ld64(receive), A.FI_RECV | A.FI_MSG, nbytes, 0)
            st64(nic + RECEIVES, receives - 1)
            st64_release(inbox + SEND_HEAD, head + 1)
            filled += 1
    return filled


@inner
def _take_arrivals(nic, buffer, filled, wanted):
    unpolled = 0
    for sender in range(ld64(nic + NUM_PEERS)):
        inbox = _inbox(nic, sender)
        unpolled += ld64_acquire(inbox + INBOX_TAIL) - ld64(inbox + INBOX_HEAD)
        unpolled += ld64_acquire(inbox + SEND_TAIL) - ld64(inbox + SEND_HEAD)
    if unpolled > ld64(nic + RX_DEPTH):
        _count(nic, OVERRUNS)
    first = _random(nic, ld64(nic + NUM_PEERS))
    for turn in range(ld64(nic + NUM_PEERS)):
        inbox = _inbox(nic, (first + turn) % ld64(nic + NUM_PEERS))
        while filled < wanted and ld64(inbox + INBOX_HEAD) < ld64_acquire(inbox + INBOX_TAIL):
            head = ld64(inbox + INBOX_HEAD)
            data = ld64(inbox + INBOX_RING + (head % RING) * 8)
            # As rxm of libfabric 1.17 does: no FI_RMA, no length.
            _entry(buffer, filled, 0, A.FI_REMOTE_WRITE | A.FI_REMOTE_CQ_DATA, 0, data)
            if filled + 1 < wanted and _one_in(nic, ARRIVE_TWICE):
                filled += 1
                _entry(buffer, filled, 0, A.FI_REMOTE_WRITE | A.FI_REMOTE_CQ_DATA, 0, data)
            st64_release(inbox + INBOX_HEAD, head + 1)
            filled += 1
    return filled


@hook("int64(int64, int64, int64)")
def CQ_READ(nic, buffer, wanted):
    st64_release(nic + POLLS, ld64(nic + POLLS) + 1)
    if ld64(nic + BROKEN) != 0:
        return -ld64(nic + BROKEN)
    _work(nic)
    if ld64(nic + ERRORS) > 0:
        return -A.FI_EAVAIL
    filled = 0
    while filled < wanted and ld64(nic + COMPLETIONS) > 0:
        left = ld64(nic + COMPLETIONS) - 1
        _entry(buffer, filled, ld64(nic + COMPLETIONS_AT + left * 16), A.FI_RMA | A.FI_WRITE, 0, 0)
        st64(nic + COMPLETIONS, left)
        filled += 1
    filled = _take_sends(nic, buffer, filled, wanted)
    filled = _take_arrivals(nic, buffer, filled, wanted)
    return filled if filled > 0 else -A.FI_EAGAIN


@hook("int64(int64, int64, int64)")
def CQ_READERR(nic, entry, flags):
    count = ld64(nic + ERRORS)
    if count == 0:
        return -A.FI_EAGAIN
    place = nic + ERRORS_AT + (count - 1) * 16
    st64(entry + A.CQ_ERR_CONTEXT, ld64(place))
    st64(entry + A.CQ_ERR_FLAGS, A.FI_RMA | A.FI_WRITE)
    st32(entry + A.CQ_ERR_ERR, ld32(place + 8))
    st32(entry + A.CQ_ERR_PROV_ERRNO, ld32(place + 12))
    st64(nic + ERRORS, count - 1)
    return 1


class FakeNetwork:
    """The NICs of ``num_ranks`` ranks, ``num_nics`` each.

    Args:
        depth: posts that a NIC takes before its queue is full.
        announced_depth: what it says that it takes; ``None``: the same.
        seed: of every random choice.
        refuse_rank: this rank's NICs refuse to register memory.
        words: initial values of state words of all NICs.
    """

    def __init__(
        self,
        num_ranks: int,
        num_nics: int = 1,
        *,
        depth: int = 64,
        announced_depth: int | None = None,
        seed: int = 1,
        refuse_rank: int = -1,
        words: dict[int, int] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.num_nics = num_nics
        self.depth = depth
        self.announced_depth = announced_depth or depth
        self.refuse_rank = refuse_rank
        nbytes = INBOXES_AT + num_ranks * INBOX_BYTES
        self.states = [[Block(nbytes) for _ in range(num_ranks)] for _ in range(num_nics)]
        self._tables = [Block(8 * num_ranks) for _ in range(num_nics)]
        for index, (table, states) in enumerate(zip(self._tables, self.states, strict=True)):
            for rank, state in enumerate(states):
                table.words[rank] = state.address
                start = {
                    PEER_STATES: table.address,
                    NUM_PEERS: num_ranks,
                    RANK: rank,
                    DEPTH: depth,
                    RANDOM: (seed * 1000 + index * 100 + rank) * 2654435761 + 88172645463325252,
                    MEMCPY: c_address("memcpy"),
                }
                for word, value in {**start, **(words or {})}.items():
                    state.words[word // 8] = value

    def openers(self, rank: int) -> list[FakeOpener]:
        """This rank's NICs."""
        return [FakeOpener(self, rank, nic) for nic in range(self.num_nics)]

    def get(self, rank: int, word: int, nic: int = 0) -> int:
        """A word of a NIC's state."""
        return int(self.states[nic][rank].words[word // 8])

    def set(self, rank: int, word: int, value: int, nic: int = 0) -> None:
        """Change one, also while the NIC runs."""
        self.states[nic][rank].words[word // 8] = value

    def check_promises(self) -> None:
        """That the engine has kept what providers are promised."""
        for nic in range(self.num_nics):
            for rank in range(self.num_ranks):
                for word in (OVERRUNS, BAD_CONTEXTS, NO_RECEIVE):
                    assert self.get(rank, word, nic) == 0, (rank, nic, word)
                assert self.get(rank, MOST_IN_FLIGHT, nic) <= self.depth


class FakeOpener:
    """See ``NicOpener``."""

    transport = "fake"

    def __init__(self, network: FakeNetwork, rank: int, nic: int) -> None:
        self.network = network
        self.rank = rank
        self.nic = nic
        self.device = f"fake{nic}"

    def open(self, sizing: Sizing) -> FakeNic:
        return FakeNic(self, sizing)


class FakeNic:
    """See ``Nic``."""

    transport = "fake"

    def __init__(self, opener: FakeOpener, sizing: Sizing) -> None:
        network = opener.network
        if sizing.num_peers > network.num_ranks:
            raise TransportUnavailable("fake: too few ranks")
        self.device = opener.device
        self._opener = opener
        self._state = network.states[opener.nic][opener.rank]
        self._state.words[RX_DEPTH // 8] = sizing.rx_depth
        self._regions = 0
        depth = min(sizing.tx_depth, network.announced_depth)
        self.limits = Limits(tx_depth=depth, peer_depth=depth, max_bytes=1 << 30)
        functions = Functions(
            writemsg=WRITEMSG, sendmsg=SENDMSG, recvmsg=RECVMSG, cq_read=CQ_READ,
            cq_readerr=CQ_READERR, ep=self._state.address, cq=self._state.address,
        )  # fmt: skip
        self._posting = PostingState(functions, sizing, depth, A.FI_COMPLETION, 0)
        self.closed = False

    @property
    def hooks(self) -> Hooks:
        return Hooks(hot.POST, hot.POLL, self._posting.address)

    def address(self) -> bytes:
        return b"%d" % self._opener.rank

    def connect(self, peers: Sequence[bytes], timeout_s: float) -> None:
        for number, address in enumerate(peers):
            self._posting.set_peer(number, int(address))

    def register(self, region: Region, **_: Any) -> Registration:
        if self._opener.rank == self._opener.network.refuse_rank:
            raise TransportError(
                f"{self.device} (fake): cannot register {region.nbytes} bytes: told to refuse",
                transport="fake",
                operation="register",
                code=12,
            )
        self._regions += 1
        key = 7919 * self._regions + self._opener.rank
        at = (REGIONS_AT + (self._regions - 1) * 24) // 8
        self._state.words[at + 1] = region.address
        self._state.words[at + 2] = region.nbytes
        self._state.words[at] = key
        return Registration(local_key=0, remote_key=key, remote_base=region.address)

    def deregister(self, registration: Registration) -> None:
        for n in range(MAX_REGIONS):
            at = (REGIONS_AT + n * 24) // 8
            if self._state.words[at] == registration.remote_key:
                self._state.words[at] = 0
        self._wait_for_writers()

    def explain(self, code: int, detail: int) -> str:
        return f"fake error {code}" + (f" ({detail})" if detail else "")

    def close(self) -> None:
        """No peer writes to this rank's memory any more."""
        for n in range(MAX_REGIONS):
            self._state.words[(REGIONS_AT + n * 24) // 8] = 0
        self._wait_for_writers()
        self.closed = True

    def _wait_for_writers(self) -> None:
        """Until whoever saw a key that is gone has written. By then its word can be seen, too."""
        time.sleep(0.001)
        for sender in range(self._opener.network.num_ranks):
            busy = (INBOXES_AT + sender * INBOX_BYTES + INBOX_BUSY) // 8
            while self._state.words[busy]:
                time.sleep(0.0001)
