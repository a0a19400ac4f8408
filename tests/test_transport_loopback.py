"""The loopback transport: the conformance suite, then faults, crashes and what they leave."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transport_conformance as conformance
from transport_conformance import fill, payload, pump, raised, read, registered

from moecomm.errors import (
    ConfigError,
    PeerTimeout,
    StateError,
    TransportError,
    TransportUnavailable,
)
from moecomm.group import Group
from moecomm.run import run
from moecomm.store_local import LocalStore
from moecomm.transport import TRANSPORTS, open_memory, shared_memory
from moecomm.transport.base import Memory, Region, Transfer
from moecomm.transport.counters import ArrivalCounter
from moecomm.transport.loopback import Faults, LoopbackMemory, LoopbackTransfer
from moecomm.transport.mailbox import NUM_SLOTS, RING_BYTES, Inbox, Outbox

ROUGH = Faults(seed=5, delay=0.003, reorder=True, duplicate=0.3, queue_depth=16)


def open_plain(group: Group) -> LoopbackMemory:
    return LoopbackMemory(group, timeout_s=conformance.TIMEOUT_S)


def open_transfer(group: Group, faults: Faults | None = None) -> LoopbackTransfer:
    return LoopbackTransfer(group, faults=faults, timeout_s=conformance.TIMEOUT_S)


def in_threads(num_ranks: int, work: Callable[[Group], Any]) -> list[Any]:
    """Call ``work`` on ranks that are threads of this process, as in a simulation."""
    store, results, errors = LocalStore(), [None] * num_ranks, []

    def one(rank: int) -> None:
        try:
            results[rank] = work(Group(rank, num_ranks, store, simulation="threads"))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def check_all(group: Group, open_it: Callable[[Group], Memory], names: list[str]) -> None:
    for name in names:
        try:
            conformance.run_check(group, open_it, name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise


# One start of processes serves all checks of a kind: starting is most of the time they take.
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_memory_conforms(num_ranks: int) -> None:
    names = list(conformance.MEMORY_CHECKS)
    if num_ranks == 1:
        names.remove("unequal_sizes_are_refused_on_all_ranks")
    run(check_all, num_ranks, open_plain, names)


@pytest.mark.parametrize("faults", [Faults(), ROUGH], ids=["calm", "rough"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_transfer_conforms(num_ranks: int, faults: Faults) -> None:
    opener = functools.partial(open_transfer, faults=faults)
    run(check_all, num_ranks, opener, list(conformance.TRANSFER_CHECKS))


@pytest.mark.parametrize("name", list(conformance.MEMORY_CHECKS))
def test_memory_conforms_in_a_simulation(name: str) -> None:
    in_threads(3, lambda group: conformance.run_check(group, open_plain, name))


@pytest.mark.parametrize("name", list(conformance.TRANSFER_CHECKS))
def test_transfer_conforms_in_a_simulation(name: str) -> None:
    opener = functools.partial(open_transfer, faults=ROUGH)
    in_threads(3, lambda group: conformance.run_check(group, opener, name))


def test_loopback_implements_the_protocols() -> None:
    group = Group(0, 1, LocalStore())
    with open_plain(group) as memory, open_transfer(group) as transfer:
        assert isinstance(memory, Memory)
        assert not isinstance(memory, Transfer)
        assert isinstance(transfer, Transfer)


# Faults


def count_until_flags(group: Group, messages: int) -> dict[str, int]:
    """Rank 0 sends data, then flags that promise it; rank 1 believes only what it has counted."""
    faults = Faults(seed=1, delay=0.02, reorder=True, queue_depth=4 * messages)
    with open_transfer(group, faults) as transfer:
        room = transfer.allocate(64 * messages)
        remote = registered(transfer, group, room)[1 - group.rank]
        result = {"flags before data": 0, "right": 0, "unordered": 0}
        if group.rank == 0:
            out = transfer.allocate(64 * messages)
            for n in range(messages):
                fill(out.part(64 * n, 64), payload(0, n, 64))
                transfer.write(out.part(64 * n, 64), remote.part(64 * n, 64), n)
                transfer.write(Region(0, 0), remote.part(0, 0), messages + n)  # flag, after data
            pump(transfer, lambda: transfer.outstanding == 0)
        else:
            transfer.allocate(64 * messages)
            came: list[int] = []
            for imm in range(2 * messages):
                transfer.expect(imm, 1, lambda imm=imm: came.append(imm))

            def believe() -> bool:
                while came:
                    imm = came.pop(0)
                    seen.append(imm)
                    if imm >= messages:
                        result["flags before data"] += imm - messages not in seen
                    else:
                        here = room.part(64 * imm, 64)
                        result["right"] += read(here) == payload(0, imm, 64)
                return len(seen) == 2 * messages

            seen: list[int] = []
            pump(transfer, believe)
            data = [imm for imm in seen if imm < messages]
            result["unordered"] = int(data != sorted(data))
        group.barrier()
        return result


def test_data_counts_only_by_its_own_completion() -> None:  # C10
    messages = 200
    result = run(count_until_flags, 2, messages)[1]
    assert result["right"] == messages
    assert result["flags before data"] > 0, "the transport was too kind for this test"
    assert result["unordered"] == 1


def flood(group: Group, messages: int, faults: Faults) -> int:
    with open_transfer(group, faults) as transfer:
        room = transfer.allocate(32 * messages * group.size)
        remote = registered(transfer, group, room)
        out = transfer.allocate(32 * messages)
        came: list[int] = []
        transfer.expect(1, messages * group.size, lambda: came.append(1))
        for n in range(messages):
            fill(out.part(32 * n, 32), payload(group.rank, n, 32))
            for peer in remote:
                place = peer.part(32 * (group.rank * messages + n), 32)
                transfer.write(out.part(32 * n, 32), place, 1)
        pump(transfer, lambda: came == [1] and transfer.outstanding == 0)
        for sender in range(group.size):
            whole = read(room.part(32 * sender * messages, 32 * messages))
            assert whole == b"".join(payload(sender, n, 32) for n in range(messages))
        group.barrier()
        return transfer.most_in_flight


def test_a_short_send_queue_holds_writers_back() -> None:  # C11
    faults = Faults(seed=2, delay=0.002, queue_depth=16)
    assert run(flood, 2, 1024, faults) == [16, 16]


def test_immediates_beyond_the_ring_wait_for_the_receiver() -> None:
    def work(group: Group) -> None:
        messages = 3 * NUM_SLOTS
        with open_transfer(group, Faults(queue_depth=4 * NUM_SLOTS)) as transfer:
            peers = transfer.peer_group([1])
            if group.rank == 0:
                for n in range(messages):
                    transfer.barrier(peers, n)
                for _ in range(50):
                    transfer.progress()
                assert transfer.outstanding == messages - NUM_SLOTS
            group.barrier()
            came: list[int] = []
            if group.rank == 1:
                for n in range(messages):
                    transfer.expect(n, 1, lambda n=n: came.append(n))
            pump(transfer, lambda: transfer.outstanding == 0 and len(came) == messages * group.rank)
            assert came == list(range(messages * group.rank))
            group.barrier()

    in_threads(2, work)


def test_a_receiver_that_stops_ends_the_write_with_an_error() -> None:
    def work(group: Group) -> None:
        with LoopbackTransfer(group, timeout_s=5.0) as transfer:
            transfer._timeout_s = 0.2
            if group.rank == 0:
                for n in range(NUM_SLOTS + 1):
                    transfer.barrier(transfer.peer_group([1]), n)
                start = time.monotonic()
                with pytest.raises(TransportError, match="rank 1 failed: it takes no more") as got:
                    pump(transfer, lambda: False)
                assert 0.15 < time.monotonic() - start < 2
                assert (got.value.peer, got.value.operation) == (1, "write")
                assert transfer.outstanding == 0
            group.barrier()

    in_threads(2, work)


def test_a_slow_peer_does_not_hold_the_others_up() -> None:  # C12, on the host
    def work(group: Group) -> list[float]:
        faults = Faults(seed=3, delay={2: 0.5}, queue_depth=64)
        with open_transfer(group, faults) as transfer:
            start, times = time.monotonic(), []
            if group.rank == 0:
                for n in range(10):
                    transfer.barrier(transfer.peer_group([2]), n)
                    transfer.barrier(transfer.peer_group([1]), n)
            else:
                transfer.expect(9, 1, lambda: times.append(time.monotonic() - start))
            pump(transfer, lambda: len(times) == (group.rank > 0) and transfer.outstanding == 0)
            group.barrier()
            return times

    fast, slow = in_threads(3, work)[1:]
    assert fast[0] < 0.1 < slow[0]


def test_without_reordering_writes_to_a_peer_stay_in_order() -> None:
    def work(group: Group) -> None:
        with open_transfer(group, Faults(seed=4, delay=0.01)) as transfer:
            came: list[int] = []
            for n in range(50):
                transfer.expect(n, 1, lambda n=n: came.append(n))
                transfer.barrier(transfer.peer_group([1 - group.rank]), n)
            pump(transfer, lambda: len(came) == 50 and transfer.outstanding == 0)
            assert came == list(range(50))
            group.barrier()

    in_threads(2, work)


def test_lost_writes_never_arrive_and_the_rest_does() -> None:
    def work(group: Group) -> tuple[int, int]:
        with open_transfer(group, Faults(seed=6, drop=0.5)) as transfer:
            came: list[int] = []
            sent: list[int] = []
            region = transfer.allocate(1)
            peer = registered(transfer, group, region)[1 - group.rank]
            for n in range(200):
                transfer.expect(n, 1, lambda n=n: came.append(n))
                transfer.write(region.part(0, 0), peer.part(0, 0), n, lambda: sent.append(1))
            pump(transfer, lambda: transfer.outstanding == 0)
            group.barrier()
            for _ in range(20):
                transfer.progress()
            group.barrier()
            return len(came), len(sent)

    for came, sent in in_threads(2, work):
        assert 60 < came < 140
        assert sent == 200


def test_writes_to_a_dead_rank_fail_and_the_others_go_on() -> None:
    def work(group: Group) -> None:
        with open_transfer(group, Faults(dead_ranks=frozenset({2}))) as transfer:
            came: list[int] = []
            everyone = transfer.peer_group([0, 1, 2])
            transfer.expect(1, 2, lambda: came.append(1))  # rank 2 stays silent
            transfer.barrier(everyone, 1)
            with pytest.raises(TransportError, match="rank 2 failed: it is dead") as got:
                pump(transfer, lambda: False)
            assert got.value.peer == 2
            pump(transfer, lambda: came == [1] * (group.rank != 2) and not transfer.outstanding)
            group.barrier()
            transfer.progress()
            group.barrier()

    in_threads(3, work)


def test_the_same_seed_makes_the_same_choices() -> None:
    def arrivals(seed: int) -> list[int]:
        def work(group: Group) -> list[int]:
            faults = Faults(seed=seed, delay=1e-9, reorder=True)
            with open_transfer(group, faults) as transfer:
                came: list[int] = []
                for n in range(30):
                    transfer.expect(n, 1, lambda n=n: came.append(n))
                    transfer.barrier(transfer.peer_group([0]), n)
                time.sleep(0.001)
                pump(transfer, lambda: len(came) == 30)
                return came

        return in_threads(1, work)[0]

    assert arrivals(1) == arrivals(1)
    assert arrivals(1) != arrivals(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"delay": -1.0}, "delay=-1.0"),
        ({"delay": {0: -1.0}}, "delay"),
        ({"drop": 1.5}, "drop=1.5"),
        ({"duplicate": -0.1}, "duplicate=-0.1"),
        ({"queue_depth": 0}, "queue_depth=0"),
    ],
)
def test_faults_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Faults(**arguments)


# Several instances, order of calls, lifetime


def many_groups_with_skew(group: Group, seed: int) -> None:
    wait = random.Random(f"{seed} {group.rank}")
    transfers = []
    for _ in range(4):
        time.sleep(wait.uniform(0, 0.02))
        transfers.append(open_transfer(group, ROUGH))
    for step in range(10):
        for n, transfer in enumerate(transfers):
            time.sleep(wait.uniform(0, 0.004))
            came: list[int] = []
            transfer.expect(step, group.size, lambda c=came: c.append(1))
            transfer.barrier(transfer.peer_group(range(group.size)), step)
            pump(transfer, lambda c=came, t=transfer: c == [1] and t.outstanding == 0)
            assert transfer._counter.seen(step + 1) < group.size, n
    for transfer in transfers:
        conformance.settle(transfer, group)
        transfer.close()


def test_several_instances_made_with_skew_stay_apart() -> None:  # C13
    run(many_groups_with_skew, 3, 1)


def two_instances_in_opposite_order(group: Group) -> None:
    first, second = open_transfer(group), open_transfer(group)
    regions = {t: t.allocate(64) for t in (first, second)}
    remotes = {t: registered(t, group, regions[t]) for t in (first, second)}
    peer = 1 - group.rank
    came: list[int] = []
    order = [first, second] if group.rank == 0 else [second, first]
    for transfer in order:
        which = 1 if transfer is first else 2
        source = transfer.buffer(regions[transfer])
        source[:8] = b"%d from %d" % (which, group.rank)
        transfer.expect(which, 1, lambda w=which: came.append(w))
        transfer.write(regions[transfer].part(0, 8), remotes[transfer][peer].part(32, 8), which)
        transfer.progress()
    pump(first, lambda: 1 in came)
    pump(second, lambda: 2 in came)
    for transfer, which in ((first, 1), (second, 2)):
        assert bytes(transfer.buffer(regions[transfer])[32:40]) == b"%d from %d" % (which, peer)
        assert transfer._counter.seen(3 - which) == 0
    group.barrier()


def test_two_instances_of_one_geometry_do_not_meet() -> None:  # D14
    run(two_instances_in_opposite_order, 2)


def drop_on_one_rank(group: Group) -> None:
    import gc

    memories = [LoopbackMemory(group) for _ in range(3)]
    for memory in memories:
        memory.allocate(1 << 16)
    if group.rank == 0:
        start = time.monotonic()
        memory = memories = None  # type: ignore[assignment]
        gc.collect()
        assert time.monotonic() - start < 1
    again = LoopbackMemory(group)
    again.allocate(4096)
    group.barrier()


def test_dropping_memory_on_one_rank_waits_for_nobody() -> None:  # D08
    run(drop_on_one_rank, 2)


def test_an_array_over_closed_memory_stays_valid() -> None:
    import numpy as np

    memory = LoopbackMemory(Group(0, 1, LocalStore()))
    region = memory.allocate(1 << 20)
    array = np.frombuffer(memory.buffer(region), dtype=np.uint8)
    memory.close()
    array[:] = 7  # a crash, were it unmapped
    assert int(array.sum()) == 7 << 20


def open_and_close_with_delays(group: Group) -> int:
    wait = random.Random(group.rank)
    for n in range(30):
        memory = LoopbackMemory(group)
        region = memory.allocate(4096)
        peer = memory.peer_pointer((group.rank + 1) % group.size)
        time.sleep(wait.uniform(0, 0.003))
        assert peer is not None
        ctypes.memset(peer, n, 4096)  # a peer may have closed its own by now
        if wait.random() < 0.5:
            time.sleep(wait.uniform(0, 0.003))
        del region
        memory.close()
    maps = Path("/proc/self/maps")
    return maps.read_text().count("memfd:moecomm") if maps.exists() else 0


def test_open_and_close_leave_no_mapping() -> None:  # D11
    assert run(open_and_close_with_delays, 3) == [0, 0, 0]


def use_in_forked_child(group: Group) -> int:
    with open_transfer(group) as transfer:
        transfer.allocate(4096)
        group.barrier()
        child = os.fork()
        if child == 0:
            calls: list[Callable[[], object]] = [
                lambda: transfer.allocate(1),
                lambda: transfer.peer_pointer(0),
                transfer.progress,
            ]
            texts = [raised(call, StateError) for call in calls]
            transfer.close()  # must not disturb the parent
            os._exit(0 if all("forked" in text for text in texts) else 1)
        _, status = os.waitpid(child, 0)
        group.barrier()
        conformance.random_traffic_is_exact(transfer, group)
        conformance.settle(transfer, group)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_and_does_no_harm() -> None:  # F13
    assert run(use_in_forked_child, 2) == [0, 0]


def wait_for_rank_that_never_allocates(group: Group) -> tuple[str, int]:
    if group.rank == 1:
        group.barrier()
        return "", 1
    memory = LoopbackMemory(group, timeout_s=0.3)
    with pytest.raises(PeerTimeout) as got:
        memory.allocate(64)
    group.barrier()
    return got.value.phase, got.value.peer


def test_a_rank_that_does_not_allocate_is_named() -> None:
    assert run(wait_for_rank_that_never_allocates, 3) == [("allocate", 1), ("", 1), ("allocate", 1)]


# Ways to share memory, and what is left of them


def allocate_without_memfd(group: Group, broken: str) -> str:
    def refuse(*_: object) -> Any:
        raise OSError("broken on purpose")

    if broken == "make on one" and group.rank == 1:
        shared_memory.Memfd.make = refuse  # type: ignore[method-assign]
    if broken == "open on one" and group.rank == 1:
        shared_memory.Memfd.open = refuse  # type: ignore[method-assign]
    if broken == "all":
        shared_memory.Memfd.make = refuse  # type: ignore[method-assign]
        shared_memory.TempFile.open = refuse  # type: ignore[method-assign]
    names_before = set(os.listdir(tempfile.gettempdir()))
    with LoopbackMemory(group) as memory:
        try:
            conformance.peers_see_each_others_stores(memory, group)
        except TransportUnavailable as error:
            return str(error)
        group.barrier()
        left = set(os.listdir(tempfile.gettempdir())) - names_before
        assert not [name for name in left if name.startswith("moecomm-")]
    return "works"


@pytest.mark.parametrize("broken", ["make on one", "open on one", "all"])
def test_other_ways_are_tried_by_all_ranks_alike(broken: str, tmp_path: Path) -> None:
    os.environ["TMPDIR"], before = str(tmp_path), os.environ.get("TMPDIR")
    try:
        results = run(allocate_without_memfd, 2, broken)
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
    if broken == "all":
        assert all("broken on purpose" in r and "one machine" in r for r in results), results
    else:
        assert results == ["works", "works"]
    assert os.listdir(tmp_path) == []


def test_a_peers_number_that_means_another_process_is_noticed() -> None:
    way = shared_memory.Memfd()
    _, offer = way.make(4096)
    other = shared_memory.Memfd()
    _, wrong = other.make(4096)
    with pytest.raises(OSError, match="another file"):
        way.open({**offer, "fd": wrong["fd"]}, 4096)
    with pytest.raises(OSError, match="another machine"):
        way.open({**offer, "machine": "elsewhere"}, 4096)
    way.everyone_has_opened()
    other.everyone_has_opened()


CRASHING = """
import os, sys
from moecomm.run import outcomes
from moecomm.transport import open_memory

def work(group):
    memory = open_memory("loopback", group)
    memory.allocate(1 << 20)
    memory.buffer()[:4] = b"here"
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "parent" and group.rank == 0:
        os.kill(os.getppid(), 9)
    return bytes(memory.buffer(rank=1)[:4])

if __name__ == "__main__":
    first, second = outcomes(work, 2, timeout_s=20)
    assert first.value == b"here", first
    assert second.exit_code == -9, second
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")
def test_kill_and_restart_leave_nothing_behind(tmp_path: Path) -> None:  # D17
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shm_before = set(os.listdir("/dev/shm"))
    for n in range(8):
        who = "parent" if n % 4 == 3 else "rank"
        done = subprocess.run(
            [sys.executable, script, who],
            env={**os.environ, "TMPDIR": str(temporary)},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == (-9 if who == "parent" else 0), done.stderr.decode()
    assert os.listdir(temporary) == []
    new = set(os.listdir("/dev/shm")) - shm_before
    assert not [name for name in new if "moecomm" in name]


# Choosing a transport


def test_unknown_and_missing_transports_are_told_apart() -> None:
    group = Group(0, 1, LocalStore())
    with pytest.raises(ConfigError, match="transport='infiniband': must be one of 'auto', 'loop"):
        open_memory("infiniband", group)
    missing = [name for name, module in TRANSPORTS.items() if module is None]
    assert {"nvlink", "nvshmem", "verbs", "efa", "loopback"} <= set(TRANSPORTS)
    assert "loopback" not in missing
    for name in missing:
        with pytest.raises(TransportUnavailable, match=f"'{name}' is not part of this version"):
            open_memory(name, group)


def test_auto_picks_loopback_on_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(0, 1, LocalStore(), device="cpu")
    with caplog.at_level(logging.INFO, logger="moecomm.transport"):
        memory = open_memory("auto", group)
    assert isinstance(memory, LoopbackMemory)
    assert "rank 0: transport 'loopback': the ranks compute on the CPU" in caplog.text
    memory.close()


def test_importing_transports_imports_no_kernels_and_no_backend() -> None:
    code = (
        "import sys, moecomm.transport; "
        "assert not [m for m in sys.modules if m.startswith('moecomm.kernels')]; "
        "assert 'moecomm.transport.loopback' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Parts without I/O


def test_private_memory_cannot_be_registered() -> None:
    with open_transfer(Group(0, 1, LocalStore())) as transfer:
        private = ctypes.create_string_buffer(64)
        with pytest.raises(ConfigError, match="must lie in memory that allocate returned"):
            transfer.register(Region(ctypes.addressof(private), 64))


def test_arrivals_settle_in_any_order() -> None:
    counter, calls = ArrivalCounter(), []
    counter.arrive(1)
    counter.expect(1, 2, lambda: calls.append("a"))
    assert counter.settle() == 0
    counter.arrive(2)
    counter.arrive(1)
    assert calls == []
    assert counter.settle() == 1
    counter.expect(2, 1, lambda: calls.append("b"))
    counter.settle()
    assert calls == ["a", "b"]
    assert (counter.seen(1), counter.seen(2)) == (0, 0)


def test_a_ring_delivers_each_message_once_across_wraps() -> None:
    memory = memoryview(bytearray(2 * RING_BYTES))
    outbox, inbox = Outbox(memory, 1), Inbox(memory, 1)
    wait, taken, expected = random.Random(1), [], []
    for message in range(5 * NUM_SLOTS):
        imm = wait.randrange(1 << 32)
        expected.append(imm)
        for _ in range(1 + (wait.random() < 0.2)):  # sometimes delivered twice
            while not outbox.push(imm, message):
                taken += inbox.take()
    taken += inbox.take()
    assert taken == expected


def test_a_ring_refuses_what_it_has_no_room_for() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    outbox, inbox = Outbox(memory, 0), Inbox(memory, 0)
    assert all(outbox.push(n, n) for n in range(NUM_SLOTS))
    assert not outbox.push(0, NUM_SLOTS)
    assert inbox.take() == list(range(NUM_SLOTS))
    assert outbox.push(5, NUM_SLOTS)
    assert inbox.take() == [5]
