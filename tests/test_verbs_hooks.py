"""The verbs transport's posting and polling, on functions that play the library: what it takes,
what it refuses, what it reports."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from verbs_ends import Event, Post

from moecomm.transport.engine import records
from moecomm.transport.engine.provider import MAX_BURST
from moecomm.transport.verbs import abi, hooks, posting_state, statuses, structures

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_PollFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_Hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
CQ, WRITES, MESSAGES = 0x1000, 0x2000, 0x3000
INLINE = 64


@dataclass
class Request:
    """A send request as the library was given it."""

    qp: int
    number: int
    opcode: int
    flags: int
    imm: int | None
    remote: tuple[int, int]
    payload: tuple[int, int, int] | None  # address, length, key


class Library:
    """Takes ``room`` requests in one call at most, then refuses with ``refusal``."""

    def __init__(self) -> None:
        self.calls: list[list[Request]] = []
        self.receives: list[tuple[int, list[int]]] = []  # queue, numbers
        self.completions: list[structures.Wc] = []
        self.room, self.refusal = 1 << 30, errno.ENOMEM
        self.most_polled = 0
        functions = _Function(self._post_send), _Function(self._post_srq), _PollFunction(self._poll)
        self._functions = functions
        addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
        self.state = posting_state.State(
            (addresses[0], addresses[1], addresses[2]), CQ, 3, WRITES, MESSAGES, INLINE
        )
        for peer in range(3):
            self.state.set_peer(peer, 0x100 + peer, 0x200 + peer)
        self._post, self._poll_hook = _Hook(hooks.post), _Hook(hooks.poll)

    def post(self, *posts: Post) -> int:
        array = (Post * len(posts))(*posts)
        return self._post(self.state.address, ctypes.addressof(array), len(posts))

    def poll(self, capacity: int = 32) -> list[Event] | int:
        array = (Event * capacity)()
        count = self._poll_hook(self.state.address, ctypes.addressof(array), capacity)
        return count if count < 0 else [Event.from_buffer_copy(e) for e in array[:count]]

    def complete(self, number: int, opcode: int, status: int = 0, **fields: int) -> None:
        self.completions.append(structures.Wc(wr_id=number, opcode=opcode, status=status, **fields))

    def _post_send(self, qp: int, first: int, bad: int) -> int:
        taken: list[Request] = []
        self.calls.append(taken)
        address: int | None = first
        while address:
            if len(taken) >= self.room:
                ctypes.c_uint64.from_address(bad).value = address
                return self.refusal
            request = structures.SendWr.from_address(address)
            payload = None
            if request.num_sge:
                sge = structures.Sge.from_address(request.sg_list)
                payload = sge.addr, sge.length, sge.lkey
            imm = None
            if request.opcode == abi.WR_RDMA_WRITE_WITH_IMM:
                imm = int.from_bytes(request.imm_data.to_bytes(4, "little"), "big")
            remote = request.ah or 0, request.remote_qpn
            taken.append(
                Request(qp, request.wr_id, request.opcode, request.send_flags, imm, remote, payload)
            )
            address = request.next
        return 0

    def _post_srq(self, queue: int, first: int, bad: int) -> int:
        numbers, address = [], first
        while address:
            receive = structures.RecvWr.from_address(address)
            numbers.append(receive.wr_id)
            address = receive.next
        self.receives.append((queue, numbers))
        return 0

    def _poll(self, queue: int, most: int, place: int) -> int:
        if queue != CQ:
            return -1
        self.most_polled = max(self.most_polled, most)
        came, self.completions = self.completions[:most], self.completions[most:]
        for n, completion in enumerate(came):
            ctypes.memmove(place + n * abi.WC_BYTES, ctypes.addressof(completion), abi.WC_BYTES)
        return len(came)


@pytest.fixture
def library() -> Library:
    return Library()


def write(context: int, peer: int = 1, nbytes: int = 100, **fields: Any) -> Post:
    post = Post(peer=peer, kind=records.WRITE, context=context, nbytes=nbytes)
    post.local, post.local_key, post.remote, post.remote_key = 0x7000, 11, 0x8000, 22
    for name, value in fields.items():
        setattr(post, name, value)
    return post


def test_a_write(library: Library) -> None:
    assert library.post(write(5, flags=records.HAS_IMM, imm=0x01020304)) == 1
    ((request,),) = library.calls
    assert request == Request(
        qp=0x101,
        number=5,
        opcode=abi.WR_RDMA_WRITE_WITH_IMM,
        flags=abi.SEND_SIGNALED,
        imm=0x01020304,
        remote=(0x8000, 22),
        payload=(0x7000, 100, 11),
    )


def test_runs_of_posts_to_one_queue_pair_are_one_call(library: Library) -> None:
    message = Post(peer=1, kind=records.SEND, context=3, local=0x7000, local_key=11, nbytes=8)
    assert library.post(write(0), write(1), write(2, peer=2), message, write(4), write(5)) == 6
    calls = [([r.number for r in call], call[0].qp) for call in library.calls]
    assert calls == [([0, 1], 0x101), ([2], 0x102), ([3], 0x201), ([4, 5], 0x101)]
    assert library.calls[2][0].opcode == abi.WR_SEND


def test_templates_keep_nothing_of_the_post_before(library: Library) -> None:
    library.post(write(0, flags=records.HAS_IMM, imm=7), write(1), write(2))
    library.post(write(3, nbytes=0))
    library.post(write(4))
    assert [r.number for r in library.calls[1]] == [3]  # the chain of three is cut
    assert library.calls[1][0].payload is None
    request = library.calls[2][0]
    assert (request.opcode, request.payload) == (abi.WR_RDMA_WRITE, (0x7000, 100, 11))


def test_small_payloads_of_host_memory_travel_inside(library: Library) -> None:
    host = 11 | posting_state.HOST_MEMORY
    sizes = {0: False, 1: True, INLINE: True, INLINE + 1: False}
    for nbytes, inline in sizes.items():
        library.post(write(0, nbytes=nbytes, local_key=host))
        library.post(write(0, nbytes=nbytes))  # of a GPU: never
        on_host, on_gpu = library.calls[-2][0], library.calls[-1][0]
        assert bool(on_host.flags & abi.SEND_INLINE) is inline
        assert not on_gpu.flags & abi.SEND_INLINE
        if nbytes:
            assert on_host.payload == (0x7000, nbytes, 11)  # the key without our mark


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN])
def test_a_full_queue(library: Library, code: int) -> None:
    library.room, library.refusal = 2, code
    assert library.post(*[write(n) for n in range(5)]) == 2
    library.room = 0
    assert library.post(write(2)) == 0
    library.room = 5
    assert library.post(write(2), write(3), write(4)) == 3


def test_a_queue_that_is_full_behind_another_ones_posts(library: Library) -> None:
    library.room = 1
    assert library.post(write(0, peer=1), write(1, peer=2), write(2, peer=2)) == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_a_post_that_can_never_be(library: Library, sign: int) -> None:
    """Reported alone: what was accepted before it comes first."""
    library.room, library.refusal = 1, sign * errno.EINVAL
    assert library.post(write(0), write(1)) == 1
    library.room = 0
    assert library.post(write(1)) == -errno.EINVAL


def test_a_whole_burst(library: Library) -> None:
    assert library.post(*[write(n) for n in range(MAX_BURST)]) == MAX_BURST
    assert [r.number for r in library.calls[0]] == list(range(MAX_BURST))


def test_events(library: Library) -> None:
    library.complete(9, abi.WC_RDMA_WRITE)
    library.complete(8, 0, statuses.REM_ACCESS_ERR, vendor_err=0x88)
    big_endian = int.from_bytes((0xAABBCCDD).to_bytes(4, "big"), "little")
    library.complete(posting_state.EMPTY_RECEIVE, abi.WC_RECV_RDMA_WITH_IMM, imm_data=big_endian)
    library.complete(posting_state.OWN_REQUEST, abi.WC_RDMA_WRITE, statuses.RETRY_EXC_ERR)
    events = library.poll()
    assert isinstance(events, list)
    sent, failed, arrived = events
    assert (sent.kind, sent.context) == (records.SENT, 9)
    assert (failed.kind, failed.context) == (records.FAILED, 8)
    assert (failed.code, failed.detail) == (statuses.REM_ACCESS_ERR, 0x88)
    assert (arrived.kind, arrived.imm) == (records.ARRIVED, 0xAABBCCDD)


def test_receives_of_nothing_are_posted_again_with_the_next_poll(library: Library) -> None:
    library.state.fill_empty(posting_state.POLL_BATCH + 5)
    assert [len(numbers) for _, numbers in library.receives] == [posting_state.POLL_BATCH, 5]
    library.receives.clear()
    for count in (3, posting_state.POLL_BATCH, 1, 7):
        for _ in range(count):
            library.complete(posting_state.EMPTY_RECEIVE, abi.WC_RECV_RDMA_WITH_IMM)
        events = library.poll()
        assert isinstance(events, list)
        assert len(events) == count
        assert library.receives == []
        assert library.poll() == []
        assert library.receives.pop() == (WRITES, [posting_state.EMPTY_RECEIVE] * count)
    assert library.poll() == []
    assert library.receives == []


def test_messages_keep_their_buffers_until_the_next_poll(library: Library) -> None:
    library.state.set_messages(0x50000, 256, 4, 33)
    numbers = [posting_state.MESSAGE_RECEIVE | n for n in range(4)]
    assert library.receives.pop() == (MESSAGES, numbers)
    for n in (2, 0):
        library.complete(numbers[n], abi.WC_RECV, byte_len=10 + n)
    events = library.poll()
    assert isinstance(events, list)
    found = [(e.kind, e.context, e.detail) for e in events]
    assert found == [
        (records.RECEIVED, 0x50000 + 2 * 256, 12),
        (records.RECEIVED, 0x50000, 10),
    ]
    assert library.receives == []
    library.complete(numbers[1], abi.WC_RECV, byte_len=1)
    library.poll()
    assert library.receives.pop() == (MESSAGES, [numbers[2], numbers[0]])
    library.poll()
    assert library.receives.pop() == (MESSAGES, [numbers[1]])
    library.poll()
    assert library.receives == []


def test_arrivals_with_an_error_are_counted_and_their_receives_posted_again(
    library: Library,
) -> None:
    library.state.set_messages(0x50000, 256, 2, 33)
    library.receives.clear()
    library.complete(posting_state.MESSAGE_RECEIVE | 1, 0, 1)
    library.complete(posting_state.EMPTY_RECEIVE, 0, 1)
    assert library.poll() == []
    assert library.state.lost == 2
    library.poll()
    assert sorted(library.receives) == [
        (WRITES, [posting_state.EMPTY_RECEIVE]),
        (MESSAGES, [posting_state.MESSAGE_RECEIVE | 1]),
    ]


def test_no_more_completions_are_taken_than_events_fit(library: Library) -> None:
    for n in range(70):
        library.complete(n, abi.WC_RDMA_WRITE)
    seen: list[int] = []
    for capacity in (3, 64, 64, 64):
        events = library.poll(capacity)
        assert isinstance(events, list)
        assert len(events) <= min(capacity, posting_state.POLL_BATCH)
        seen += [event.context for event in events]
    assert seen == list(range(70))
    assert library.most_polled == posting_state.POLL_BATCH


def test_a_broken_device(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: Callable[..., int] = _PollFunction(lambda queue, most, place: -1)
    address = ctypes.cast(broken, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    library.state._set(posting_state.POLL_CQ, address)
    assert library.poll() == -errno.EIO
