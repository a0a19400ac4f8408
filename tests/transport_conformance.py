"""What every transport must do. A backend's test file adds only how to open it.

Each check runs on all ranks at once, on a transport that was opened for it, and raises where the
transport is wrong. ``run_check`` is the function for ``moecomm.run``:

    @pytest.mark.parametrize("name", transport_conformance.MEMORY_CHECKS)
    def test_memory(name):
        mc.run(transport_conformance.run_check, 2, open_mine, name)
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable

from moecomm import cuda_driver
from moecomm.errors import ConfigError, StateError
from moecomm.group import Group
from moecomm.transport.base import Memory, Region, RemoteRegion, Transfer, Write

TIMEOUT_S = 20.0
GPU: int | None = None  # whose memory it is; ``None``: this process's own


def run_check(group: Group, open_it: Callable[[Group], Memory], name: str) -> None:
    """Open a transport and run one check on it."""
    memory = open_it(group)
    try:
        {**MEMORY_CHECKS, **TRANSFER_CHECKS}[name](memory, group)
        settle(memory, group)
    finally:
        memory.close()


def settle(memory: Memory, group: Group) -> None:
    """Until every rank has nothing left to send; no rank stops serving before that."""
    if isinstance(memory, Transfer):
        pump(memory, lambda: memory.outstanding == 0)
    group.barrier()


def pump(transfer: Transfer, done: Callable[[], bool], timeout_s: float | None = None) -> None:
    """Progress until ``done``; at most ``TIMEOUT_S``, unless told otherwise."""
    deadline = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    while not done():
        if not transfer.progress():
            time.sleep(0.0002)
        assert time.monotonic() < deadline, "the transport got stuck"


def payload(sender: int, message: int, nbytes: int) -> bytes:
    """Bytes that no other message has, and that a shift by any number of bytes would change."""
    return random.Random(f"{sender} {message}").randbytes(nbytes)


def load(address: int, nbytes: int) -> bytes:
    if GPU is None:
        return ctypes.string_at(address, nbytes)
    return cuda_driver.copy_from_device(GPU, address, nbytes)


def store(address: int, data: bytes) -> None:
    if GPU is None:
        ctypes.memmove(address, data, len(data))
    else:
        cuda_driver.copy_to_device(GPU, address, data)


def read(region: Region) -> bytes:
    return load(region.address, region.nbytes)


def fill(region: Region, data: bytes) -> None:
    assert len(data) == region.nbytes
    store(region.address, data)


def registered(transfer: Transfer, group: Group, region: Region) -> list[RemoteRegion]:
    """Everybody's ``region``, by rank."""
    mine = transfer.register(region).to_bytes()
    return [RemoteRegion.from_bytes(b) for b in group.all_gather(mine)]


def raised(call: Callable[[], object], kind: type[Exception]) -> str:
    """The message of the error that ``call`` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


# Memory


def fresh_memory_is_zero_and_aligned(memory: Memory, group: Group) -> None:
    region = memory.allocate(3 * mmap.PAGESIZE + 5)
    assert region.nbytes == 3 * mmap.PAGESIZE + 5
    assert region.address % mmap.PAGESIZE == 0
    assert read(region) == bytes(region.nbytes)


def peers_see_each_others_stores(memory: Memory, group: Group) -> None:
    region = memory.allocate(64 * group.size)
    fill(region, payload(group.rank, 0, region.nbytes))
    group.barrier()
    for peer in range(group.size):
        pointer = memory.peer_pointer(peer, region)
        if pointer is not None:
            assert load(pointer, region.nbytes) == payload(peer, 0, region.nbytes)
    group.barrier()
    for peer in range(group.size):
        pointer = memory.peer_pointer(peer)
        if pointer is not None:
            own_part = Region(pointer, region.nbytes).part(64 * group.rank, 64)
            fill(own_part, payload(group.rank, 1, 64))
    group.barrier()
    for peer in range(group.size):
        if memory.peer_pointer(peer) is not None:
            assert read(region.part(64 * peer, 64)) == payload(peer, 1, 64)


def allocations_are_apart(memory: Memory, group: Group) -> None:
    regions = [memory.allocate(100 + n) for n in range(3)]
    for n, region in enumerate(regions):
        fill(region, payload(group.rank, n, region.nbytes))
    group.barrier()
    for n, region in enumerate(regions):
        for peer in range(group.size):
            pointer = memory.peer_pointer(peer, region)
            if pointer is not None:
                assert load(pointer, region.nbytes) == payload(peer, n, region.nbytes)
    assert "of which there are 3" in raised(lambda: memory.peer_pointer(0), ConfigError)


def unequal_sizes_are_refused_on_all_ranks(memory: Memory, group: Group) -> None:
    text = raised(lambda: memory.allocate(4096 + group.rank), ConfigError)
    assert "4096" in text
    assert "4097" in text
    assert memory.allocate(10).nbytes == 10


def a_bad_size_on_one_rank_is_refused_on_all(memory: Memory, group: Group) -> None:
    for bad in (0, -1, 1 << 60, 1.5):
        nbytes = bad if group.rank == group.size - 1 else 4096
        text = raised(lambda n=nbytes: memory.allocate(n), ConfigError)
        assert f"rank {group.size - 1}: nbytes={bad}" in text


def ranks_are_checked(memory: Memory, group: Group) -> None:
    memory.allocate(1)
    for rank in (-1, group.size):
        assert f"rank={rank}" in raised(lambda r=rank: memory.peer_pointer(r), ConfigError)


def close_is_idempotent_and_final(memory: Memory, group: Group) -> None:
    memory.allocate(1)
    group.barrier()
    memory.close()
    memory.close()
    raised(lambda: memory.allocate(1), StateError)
    raised(lambda: memory.peer_pointer(0), StateError)


def a_peer_may_close_first(memory: Memory, group: Group) -> None:
    region = memory.allocate(4096)
    pointer = memory.peer_pointer(0, region)
    fill(region, payload(group.rank, 0, 4096))
    group.barrier()
    if group.rank == 0:
        memory.close()
    group.barrier()
    if group.rank != 0 and pointer is not None:
        assert load(pointer, 4096) == payload(0, 0, 4096)
        group.barrier()
        store(pointer, b"\1" * 4096)
    else:
        group.barrier()


# Transfer


def a_write_and_its_immediate_land_together(transfer: Transfer, group: Group) -> None:
    region = transfer.allocate(256 * group.size)
    remote = registered(transfer, group, region)
    src = transfer.allocate(200)
    fill(src, payload(group.rank, 0, 200))
    got: dict[int, bytes] = {}
    for peer in range(group.size):
        here = region.part(256 * peer, 200)
        transfer.expect(100 + peer, 1, lambda p=peer, h=here: got.update({p: read(h)}))
    for peer in range(group.size):  # including itself
        transfer.write(src, remote[peer].part(256 * group.rank, 200), 100 + group.rank)
    pump(transfer, lambda: len(got) == group.size)
    assert got == {p: payload(p, 0, 200) for p in range(group.size)}


def writes_of_nothing_and_of_much(transfer: Transfer, group: Group) -> None:
    big = 8 << 20
    region = transfer.allocate(big)
    remote = registered(transfer, group, region)
    src = transfer.allocate(big)
    fill(src, payload(group.rank, 0, big))
    peer, other = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    came: list[str] = []
    transfer.expect(1, 1, lambda: came.append("nothing"))
    transfer.expect(2, 1, lambda: came.append("much"))
    transfer.write(src.part(0, 0), remote[peer].part(0, 0), 1)
    transfer.write(src, remote[peer], 2)
    pump(transfer, lambda: len(came) == 2)
    assert read(region) == payload(other, 0, big)


def early_arrivals_count(transfer: Transfer, group: Group) -> None:
    peers = transfer.peer_group(range(group.size))
    for _ in range(5):
        transfer.barrier(peers, 7)
    pump(transfer, lambda: transfer.outstanding == 0)
    group.barrier()
    came: list[int] = []
    transfer.expect(7, 2 * group.size, lambda: came.append(1))
    pump(transfer, lambda: came == [1])
    transfer.expect(7, 3 * group.size, lambda: came.append(2))  # what the first left over
    pump(transfer, lambda: came == [1, 2])
    transfer.expect(7, 1, lambda: came.append(3))
    for _ in range(20):
        transfer.progress()
    assert came == [1, 2], "an arrival was counted twice"


def one_expectation_per_immediate(transfer: Transfer, group: Group) -> None:
    transfer.expect(3, 1, lambda: None)
    raised(lambda: transfer.expect(3, 1, lambda: None), StateError)
    for count in (0, -1, 1.0):
        raised(lambda c=count: transfer.expect(4, c, lambda: None), ConfigError)


def notify_may_use_the_transport(transfer: Transfer, group: Group) -> None:
    """A ring: each arrival triggers the next write, from inside ``notify``."""
    next_rank = transfer.peer_group([(group.rank + 1) % group.size])
    laps: list[int] = []

    def came() -> None:
        laps.append(1)
        if len(laps) < 10:
            transfer.expect(5, 1, came)
        if not (group.rank == 0 and len(laps) == 10):
            transfer.barrier(next_rank, 5)

    transfer.expect(5, 1, came)
    if group.rank == 0:
        transfer.barrier(next_rank, 5)
    pump(transfer, lambda: len(laps) == 10)


def scatter_gives_each_peer_its_slice(transfer: Transfer, group: Group) -> None:
    region = transfer.allocate(512 * group.size)
    remote = registered(transfer, group, region)
    order = list(range(group.size))[::-1]
    peers = transfer.peer_group(order)
    outgoing = transfer.allocate(512 * group.size)
    slices = []
    for peer in order:
        length = 17 + peer
        part = outgoing.part(512 * peer, length)
        fill(part, payload(group.rank, peer, length))
        slices.append(Write(part, remote[peer].part(512 * group.rank, length)))
    sent: list[int] = []
    came: list[int] = []
    transfer.expect(9, group.size, lambda: came.append(1))
    transfer.scatter(peers, slices, 9, lambda: sent.append(1))
    pump(transfer, lambda: came == [1] and sent == [1])
    for peer in range(group.size):
        length = 17 + group.rank
        assert read(region.part(512 * peer, length)) == payload(peer, group.rank, length)
    raised(lambda: transfer.scatter(peers, slices[1:], 9), ConfigError)


def a_source_may_change_once_sent(transfer: Transfer, group: Group) -> None:
    rounds = 20
    region = transfer.allocate(64 * rounds)
    remote = registered(transfer, group, region)
    src = transfer.allocate(64)
    peer, other = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    came: list[int] = []
    transfer.expect(1, rounds, lambda: came.append(1))
    for n in range(rounds):
        fill(src, payload(group.rank, n, 64))
        sent: list[int] = []
        transfer.write(src, remote[peer].part(64 * n, 64), 1, lambda s=sent: s.append(1))
        pump(transfer, lambda s=sent: s == [1])
    pump(transfer, lambda: came == [1])
    assert read(region) == b"".join(payload(other, n, 64) for n in range(rounds))


def random_traffic_is_exact(transfer: Transfer, group: Group) -> None:
    """Every message has an immediate of its own and is read the moment that is counted."""
    messages, room = 150, 300
    region = transfer.allocate(room * messages * group.size)
    remote = registered(transfer, group, region)
    lengths = [random.Random(n).randrange(0, room) for n in range(messages)]
    outgoing = transfer.allocate(room * messages)
    checked: list[tuple[int, int]] = []

    def check(sender: int, n: int) -> None:
        here = region.part(room * (sender * messages + n), lengths[n])
        assert read(here) == payload(sender, n, lengths[n]), (sender, n)
        checked.append((sender, n))

    for sender in range(group.size):
        for n in range(messages):
            transfer.expect(sender << 16 | n, 1, lambda s=sender, n=n: check(s, n))
    for n in range(messages):
        part = outgoing.part(room * n, lengths[n])
        fill(part, payload(group.rank, n, lengths[n]))
        for peer in range(group.size):
            place = remote[peer].part(room * (group.rank * messages + n), lengths[n])
            transfer.write(part, place, group.rank << 16 | n)
    pump(transfer, lambda: len(checked) == messages * group.size)
    assert len(set(checked)) == len(checked)


def thousands_of_writes_of_random_sizes(transfer: Transfer, group: Group) -> None:
    """More than any queue holds, to peers at random; each sender counts into one immediate."""
    messages, room = 4000 // group.size, 4096
    plan = [
        [
            (dice.randrange(group.size), min(int(dice.expovariate(1 / 300)), room))
            for _ in range(messages)
        ]
        for dice in (random.Random(f"plan {sender}") for sender in range(group.size))
    ]
    inbox = transfer.allocate(room * messages * group.size)
    remote = registered(transfer, group, inbox)
    outgoing = transfer.allocate(room * messages)
    came: list[int] = []
    for sender in range(group.size):
        count = sum(1 for peer, _ in plan[sender] if peer == group.rank)
        if count:
            transfer.expect(sender, count, lambda s=sender: came.append(s))
        else:
            came.append(sender)
    for n, (peer, nbytes) in enumerate(plan[group.rank]):
        part = outgoing.part(room * n, nbytes)
        fill(part, payload(group.rank, n, nbytes))
        place = remote[peer].part(room * (group.rank * messages + n), nbytes)
        transfer.write(part, place, group.rank)
        if n % 64 == 0:
            transfer.progress()
    pump(transfer, lambda: len(came) == group.size, 4 * TIMEOUT_S)
    for sender in range(group.size):
        for n, (peer, nbytes) in enumerate(plan[sender]):
            here = inbox.part(room * (sender * messages + n), room)
            expected = payload(sender, n, nbytes) if peer == group.rank else b""
            assert read(here) == expected.ljust(room, b"\0"), (sender, n)


def operations_tell_when_they_are_done(transfer: Transfer, group: Group) -> None:
    region = transfer.allocate(64 * group.size)
    remote = registered(transfer, group, region)
    src = transfer.allocate(64)
    operations = [transfer.write(src, peer.part(64 * group.rank, 64)) for peer in remote]
    sent: list[int] = []
    operations.append(transfer.scatter(transfer.peer_group([]), [], 1, lambda: sent.append(1)))
    everyone = transfer.peer_group(range(group.size))
    operations.append(transfer.barrier(everyone, 1))
    pump(transfer, lambda: all(operation.done for operation in operations))
    assert [operation.error for operation in operations] == [None] * len(operations)
    assert sent == [1], "a scatter to nobody is done"
    assert transfer.outstanding == 0


def bad_writes_are_refused_before_anything_is_written(transfer: Transfer, group: Group) -> None:
    region = transfer.allocate(4096)
    remote = registered(transfer, group, region)[0]
    src = transfer.allocate(4096)
    fill(src, b"\x01" * 4096)
    write = transfer.write
    raised(lambda: write(src.part(0, 8), remote.part(0, 4), 1), ConfigError)
    raised(lambda: write(src.part(0, 8), remote.part(4092, 8), 1), ConfigError)
    outside = RemoteRegion(0, remote.address + 4092, 8, remote.key)
    raised(lambda: write(src.part(0, 8), outside, 1), ConfigError)
    nowhere = RemoteRegion(group.size, remote.address, 8, remote.key)
    raised(lambda: write(src.part(0, 8), nowhere, 1), ConfigError)
    for imm in (-1, 1 << 32, 1.0, True):
        raised(lambda i=imm: write(src, remote, i), ConfigError)
        raised(lambda i=imm: transfer.expect(i, 1, lambda: None), ConfigError)
    raised(lambda: transfer.peer_group([0, group.size]), ConfigError)
    raised(lambda: transfer.register(Region(region.address, 1 << 40)), ConfigError)
    assert transfer.outstanding == 0
    group.barrier()
    assert read(region) == bytes(4096)


def nothing_works_after_close(transfer: Transfer, group: Group) -> None:
    region = transfer.allocate(64)
    remote = registered(transfer, group, region)[0]
    group.barrier()
    transfer.close()
    transfer.close()
    raised(lambda: transfer.write(Region(0, 0), remote.part(0, 0), 1), StateError)
    raised(lambda: transfer.expect(1, 1, lambda: None), StateError)
    raised(transfer.progress, StateError)


MEMORY_CHECKS = {
    check.__name__: check
    for check in (
        fresh_memory_is_zero_and_aligned,
        peers_see_each_others_stores,
        allocations_are_apart,
        unequal_sizes_are_refused_on_all_ranks,
        a_bad_size_on_one_rank_is_refused_on_all,
        ranks_are_checked,
        close_is_idempotent_and_final,
        a_peer_may_close_first,
    )
}
TRANSFER_CHECKS = {
    check.__name__: check
    for check in (
        a_write_and_its_immediate_land_together,
        writes_of_nothing_and_of_much,
        early_arrivals_count,
        one_expectation_per_immediate,
        notify_may_use_the_transport,
        scatter_gives_each_peer_its_slice,
        a_source_may_change_once_sent,
        random_traffic_is_exact,
        thousands_of_writes_of_random_sizes,
        operations_tell_when_they_are_done,
        bad_writes_are_refused_before_anything_is_written,
        nothing_works_after_close,
    )
}
