"""What the transfer engine offers beyond ``Transfer``, and its ends."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from typing import Any

import engine_programs
import fake_nic
import numpy as np
import pytest
from engines import on_fake, open_fake, options
from fake_nic import FakeNetwork
from threads import run_threads
from transport_conformance import fill, payload, pump, raised, read, registered

import moecomm as mc
from moecomm import cpus
from moecomm.errors import ConfigError, PeerTimeout, StateError, TransportError
from moecomm.group import Group
from moecomm.store_local import LocalStore
from moecomm.transport.base import Region, Write
from moecomm.transport.engine import EngineOptions, TransferEngine, topology
from moecomm.transport.engine.flags import Flags

ROUGH = {fake_nic.REORDER: 1, fake_nic.DELAY: 3, fake_nic.REFUSE: 5}


def rough(num_ranks: int, num_nics: int = 1, **changes: Any) -> FakeNetwork:
    return FakeNetwork(num_ranks, num_nics, words=ROUGH, **changes)


# ---- Writes -------------------------------------------------------------------------------------


def test_shards_go_over_all_nics_and_each_counts() -> None:
    network = rough(2, 3)

    def work(engine: TransferEngine, group: Group) -> None:
        peer = 1 - group.rank
        region = engine.allocate(100_000)
        remote = registered(engine, group, region)
        src = engine.allocate(100_000)
        fill(src, payload(group.rank, 0, src.nbytes))
        for nbytes in (100_000, 99_999, 65, 1, 0):
            engine.write(src.part(0, nbytes), remote[peer].part(0, nbytes), 5, shards=7)
        engine.wait_imm(5, 5 * 7)
        assert read(region) == payload(peer, 0, region.nbytes)
        assert engine.arrived(5) == 0
        group.barrier()  # all have looked at it
        everyone = engine.peer_group([peer, group.rank])
        slices = [Write(src.part(0, 999), remote[r].part(50_000, 999)) for r in everyone.ranks]
        engine.scatter(everyone, slices, 6, shards=2)
        engine.wait_imm(6, 4)
        for bad in (0, -1, 1.0, True, 5000):
            raised(lambda b=bad: engine.write(src, remote[0], shards=b), ConfigError)

    on_fake(work, network)
    posts = [network.get(0, fake_nic.POSTS, nic) for nic in range(3)]
    assert min(posts) > 10, posts


def test_pages_are_copied_by_number() -> None:
    network = rough(2, 2)

    def work(engine: TransferEngine, group: Group) -> None:
        peer = 1 - group.rank
        page, count = 192, 700
        region = engine.allocate(page * count)
        remote = registered(engine, group, region)
        src = engine.allocate(page * count)
        fill(src, payload(group.rank, 0, src.nbytes))
        dice = np.random.default_rng(3)  # the same on both ranks
        sources, targets = dice.permutation(count), dice.permutation(count)
        sent: list[int] = []
        operation = engine.write_pages(
            src, sources, remote[peer], targets, page, 9, lambda: sent.append(1)
        )
        engine.wait_imm(9, count)
        engine.wait(operation)
        assert sent == [1]
        theirs = np.frombuffer(payload(peer, 0, src.nbytes), np.uint8).reshape(count, page)
        mine = np.frombuffer(read(region), np.uint8).reshape(count, page)
        assert (mine[targets] == theirs[sources]).all()
        one = remote[peer]
        refused = [
            lambda: engine.write_pages(src, [0, 1], one, [0], page),
            lambda: engine.write_pages(src, [count], one, [0], page),
            lambda: engine.write_pages(src, [0], one, [-1], page),
            lambda: engine.write_pages(src, [0.5], one, [0], page),
            lambda: engine.write_pages(src, [0], one, [0], 0),
        ]
        for call in refused:
            raised(call, ConfigError)
        assert engine.write_pages(src, [], one, [], page).done is False
        pump(engine, lambda: engine.outstanding == 0)

    on_fake(work, network)


def test_more_commands_than_the_rings_hold_are_kept() -> None:
    network = rough(2, depth=4)

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(64)
        remote = registered(engine, group, region)[1 - group.rank]
        pages = np.zeros(3000, np.int64)
        operations = [engine.write_pages(region, pages, remote, pages, 8, 1)]
        operations += [engine.write(region, remote, 2) for _ in range(500)]
        engine.wait_imm(1, 3000)
        engine.wait_imm(2, 500)
        pump(engine, lambda: engine.outstanding == 0)
        assert all(operation.done for operation in operations)

    on_fake(work, network, commands=64, operations=16, rx_depth=4)
    network.check_promises()


def test_writes_longer_than_a_nic_takes_are_refused_with_a_way_out() -> None:
    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)[0]
        long = Region(region.address, 1 << 31)
        engine._regions.add(long, engine._regions.find(region).nics)  # no such memory is needed
        text = raised(
            lambda: engine.write(long, type(remote)(0, remote.address, 1 << 31, remote.key)),
            ConfigError,
        )
        assert "must lie in the 4096 bytes" in text
        assert "use shards" in raised(lambda: engine._check_length((1 << 30) + 1), ConfigError)

    on_fake(work, FakeNetwork(1))


# ---- Memory -------------------------------------------------------------------------------------


def test_any_memory_of_the_process_can_be_registered() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        array = np.zeros(5000, np.uint8)
        mine = Region(array.ctypes.data, array.nbytes)
        remote = registered(engine, group, mine)
        source = np.full(5000, 7 + group.rank, np.uint8)
        src = Region(source.ctypes.data, source.nbytes)
        refusal = raised(lambda: engine.write(src, remote[0]), ConfigError)
        assert "must lie in memory that allocate returned or register was given" in refusal
        engine.register(src)
        engine.write(src.part(100, 4000), remote[1 - group.rank].part(50, 4000), 1)
        engine.wait_imm(1)
        assert (array[50:4050] == 8 - group.rank).all()
        assert array[:50].sum() == array[4050:].sum() == 0
        group.barrier()
        engine.deregister(src)
        raised(lambda: engine.write(src, remote[0]), ConfigError)
        raised(lambda: engine.deregister(src), ConfigError)
        raised(lambda: engine.register(Region(1 << 40, 64)), ConfigError)
        raised(lambda: engine.register(Region(source.ctypes.data, 0)), ConfigError)
        raised(lambda: engine.register(Region(64, 64), on_gpu=True), ConfigError)

    on_fake(work, network)


# ---- Arrivals -----------------------------------------------------------------------------------


def test_flags_are_published_when_arrivals_are_complete() -> None:
    network = rough(3)

    def work(engine: TransferEngine, group: Group) -> None:
        flags = Flags(2)
        everyone = engine.peer_group(range(group.size))
        for epoch in range(1, 40):
            engine.expect(3, group.size, flag=flags[1].address, value=epoch)
            engine.barrier(everyone, 3)
            deadline = time.monotonic() + 10
            while flags[1].value != epoch:
                assert time.monotonic() < deadline
                time.sleep(0)
            pump(engine, lambda: not engine._expected)
        assert flags[0].value == 0
        assert flags[1].device_address == flags[0].device_address + 128

    on_fake(work, network)


def test_a_wait_that_ends_in_time_out_uses_nothing_up() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        peer = 1 - group.rank
        engine.barrier(engine.peer_group([peer]), 4)
        with pytest.raises(PeerTimeout) as caught:
            engine.wait_imm(4, 2, timeout_s=0.2, peer=peer)
        error = caught.value
        assert (error.phase, error.peer, error.expected, error.seen) == ("imm 4", peer, 2, 1)
        assert (error.rank, error.transport) == (group.rank, "fake")
        group.barrier()
        engine.barrier(engine.peer_group([peer]), 4)
        engine.wait_imm(4, 2)
        assert engine.arrived(4) == 0

    on_fake(work, network)


def test_immediates_of_all_32_bits_are_told_apart() -> None:
    network = rough(2)

    def work(engine: TransferEngine, group: Group) -> None:
        imms = [0, 1, 4095, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
        for n, imm in enumerate(imms):
            for _ in range(n + 1):
                engine.barrier(engine.peer_group([1 - group.rank]), imm)
        for n, imm in enumerate(imms):
            engine.wait_imm(imm, n + 1)
            assert engine.arrived(imm) == 0

    on_fake(work, network)


# ---- Messages -----------------------------------------------------------------------------------


def test_messages_arrive_once_however_many_are_sent() -> None:
    network = rough(3)

    def work(engine: TransferEngine, group: Group) -> None:
        count = 60
        sent: list[int] = []
        for n in range(count):
            for peer in range(group.size):
                engine.send(peer, payload(group.rank, n, n % 257), lambda: sent.append(1))
        assert engine.outstanding > 0
        got: dict[int, list[bytes]] = {peer: [] for peer in range(group.size)}
        for _ in range(count * group.size):
            message = engine.receive(10)
            assert message is not None
            got[message[0]].append(message[1])
        for peer, messages in got.items():
            expected = [payload(peer, n, n % 257) for n in range(count)]
            assert sorted(messages) == sorted(expected)
        pump(engine, lambda: len(sent) == count * group.size)
        assert engine.receive() is None
        assert "at most 256" in raised(lambda: engine.send(0, bytes(257)), ConfigError)

    on_fake(work, network)
    network.check_promises()


def test_an_engine_without_messages_says_so() -> None:
    def work(engine: TransferEngine, group: Group) -> None:
        raised(lambda: engine.send(0, b"x"), ConfigError)
        assert engine.receive() is None

    on_fake(work, FakeNetwork(1), message_bytes=0)


# ---- Programs -----------------------------------------------------------------------------------


def test_a_program_runs_in_the_loop() -> None:
    """A ring of 2000 hops that no Python code takes part in."""
    network = rough(3)

    def work(engine: TransferEngine, group: Group) -> int:
        state = engine_programs.ring_state(engine, group, hops=2000)
        group.barrier()
        engine.set_program(engine_programs.RING, state.address)
        pump(engine, lambda: state.words[engine_programs.LEFT // 8] == 0)
        engine.set_program(0)
        return int(state.words[engine_programs.SEEN // 8])

    seen = on_fake(work, network)
    assert seen == [2000] * 3


@pytest.mark.parametrize("writes", [3, 32, 33, 200])
def test_a_program_may_queue_more_writes_than_batches_queues_and_credits_take(writes: int) -> None:
    def work(engine: TransferEngine, group: Group) -> None:
        state = engine_programs.ring_state(engine, group, hops=writes)
        group.barrier()
        engine.set_program(engine_programs.FLOOD, state.address)
        for imm in range(writes):
            engine.wait_imm(imm)
        pump(engine, lambda: engine.program_pending(engine.program_operations[0]) == 0)
        engine.set_program(0)
        group.barrier()
        assert [engine.arrived(imm) for imm in range(writes)] == [0] * writes

    on_fake(work, rough(3), tx_depth=24, rx_depth=12)


def test_a_program_gets_nothing_through_to_a_peer_that_failed() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        state = engine_programs.ring_state(engine, group, hops=50)
        group.barrier()
        if group.rank == 0:
            network.set(0, fake_nic.FAIL, 1)
            engine.set_program(engine_programs.FLOOD, state.address)
            operation = engine.program_operations[0]
            pump(engine, lambda: engine.program_pending(operation) == 0)
            posts = network.get(0, fake_nic.POSTS)
            state.put(engine_programs.LEFT, "=Q", 50)
            pump(engine, lambda: state.words[engine_programs.LEFT // 8] == 0)
            pump(engine, lambda: engine.program_pending(operation) == 0)
            assert network.get(0, fake_nic.POSTS) == posts
            engine.set_program(0)
        group.barrier()

    on_fake(work, network)


def test_a_program_that_fails_ends_the_engine() -> None:
    def work(engine: TransferEngine, group: Group) -> None:
        engine.set_program(engine_programs.FAILING)
        with pytest.raises(TransportError, match="the program failed with 42"):
            pump(engine, lambda: False)

    on_fake(work, FakeNetwork(1))


# ---- Set-up and ends ----------------------------------------------------------------------------


def test_ranks_must_agree_on_what_peers_depend_on() -> None:
    network = FakeNetwork(2)

    def one(group: Group) -> str:
        changes = {"rx_depth": 64 + group.rank}
        return raised(lambda: open_fake(group, network, **changes), ConfigError)

    texts = run_threads(one, 2)
    assert texts == ["rx_depth: 64 on rank 0, 65 on rank 1; must be equal on all ranks"] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("tx_depth", 0), ("commands", 1.5), ("timeout_s", 0), ("operations", True), ("sleep_us", -1)],
)
def test_options_are_checked(name: str, value: object) -> None:
    text = raised(lambda: EngineOptions(**{name: value}), ConfigError)
    assert text.startswith(f"{name}={value!r}: must be")


def test_too_few_places_for_arrivals_are_refused() -> None:
    group = Group(0, 3, LocalStore())
    text = raised(lambda: open_fake(group, FakeNetwork(3), rx_depth=2), ConfigError)
    assert text == "rx_depth=2: must be at least the number of ranks, 3"


def test_closing_is_quick_with_everything_under_way() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)
        group.barrier()
        network.set(group.rank, fake_nic.SILENT, 3)
        for _ in range(500):
            engine.write(region, remote[1 - group.rank], 1)
        engine.expect(2, 1)
        started = time.monotonic()
        engine.close()
        engine.close()
        assert time.monotonic() - started < 2.0
        raised(engine.progress, StateError)
        raised(lambda: engine.register(region), StateError)
        raised(lambda: engine.send(0, b""), StateError)

    on_fake(work, network)


def test_an_engine_that_nobody_closes_goes_with_its_last_reference() -> None:
    threads = set(os.listdir("/proc/self/task"))
    engine = open_fake(Group(0, 1, LocalStore()), FakeNetwork(1))
    nic = engine._nics[0]
    del engine
    gc.collect()
    assert nic.closed
    assert set(os.listdir("/proc/self/task")) <= threads


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    engine = open_fake(Group(0, 1, LocalStore()), FakeNetwork(1))
    pid = os.fork()
    if pid == 0:
        try:
            raised(engine.progress, StateError)
            engine.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    engine.barrier(engine.peer_group([0]), 1)
    engine.wait_imm(1)
    engine.close()


def test_a_process_may_end_without_closing() -> None:
    mc.run(leave_without_closing, 2, timeout_s=60)


def leave_without_closing(group: Group) -> None:
    from moecomm.transport.efa import open_engine

    engine = open_engine(group, "tcp", options=options())
    engine.barrier(engine.peer_group(range(2)), 1)
    engine.wait_imm(1, 2)
    globals()["kept"] = engine


def test_a_worker_stopped_for_long_blames_nobody() -> None:
    """As when a process is stopped in a debugger: the time does not count."""
    network = FakeNetwork(1)

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(64)
        remote = engine.register(region)
        network.set(0, fake_nic.SILENT, 1)
        operation = engine.write(region, remote, 1)
        pump(engine, lambda: network.get(0, fake_nic.PENDING) == 1)
        with engine._resources.worker.paused():
            time.sleep(1.3)
        network.set(0, fake_nic.SILENT, 0)
        engine.wait(operation)

    on_fake(work, network, timeout_s=1.0)


# ---- Parts --------------------------------------------------------------------------------------


def test_processors_near_a_gpu_come_from_sysfs(tmp_path: Any) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0,5-7\n")
    (device / "numa_node").write_text("1\n")
    allowed = cpus.allowed()
    assert topology.parse("0,5-7\n") == {0, 5, 6, 7}
    assert topology.cpus_near("0000:3B:00.0", tmp_path) == {0, 5, 6, 7} & allowed
    (device / "numa_node").write_text("-1\n")
    assert topology.cpus_near("0000:3b:00.0", tmp_path) == frozenset()
    assert topology.cpus_near("0000:99:00.0", tmp_path) == frozenset()


def test_the_nearest_nics_share_the_longest_way_with_the_gpu(tmp_path: Any) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "class/infiniband").mkdir(parents=True)

    def add(way: str, link: str) -> None:
        target = tmp_path / "devices" / way
        target.mkdir(parents=True)
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(target)

    add("pci0/switch0/gpu", "bus/pci/devices/0000:3b:00.0")
    add("pci0/switch0/nic", "class/infiniband/rdmap1/device")
    add("pci0/switch1/nic", "class/infiniband/rdmap2/device")
    add("pci1/switch0/nic", "class/infiniband/rdmap3/device")
    names = ["rdmap1-rdm", "rdmap2-rdm", "rdmap3-rdm"]
    assert topology.nearest(names, "0000:3B:00.0", tmp_path) == ["rdmap1-rdm"]
    assert topology.nearest(names[1:], "0000:3b:00.0", tmp_path) == ["rdmap2-rdm"]
    assert topology.nearest([*names, "other"], "0000:3b:00.0", tmp_path) == [*names, "other"]
    assert topology.nearest(names, "0000:00:00.0", tmp_path) == names


def test_flags_on_the_cpu_are_plain_memory() -> None:
    flags = Flags(3)
    assert len(flags) == 3
    flags[2].value = 1 << 40
    assert ctypes.c_int64.from_address(flags[2].address).value == 1 << 40
    assert [flag.value for flag in (flags[0], flags[1])] == [0, 0]
    assert "must be one of pinned, gdr, dmabuf" in raised(lambda: Flags(1, 0, "x"), ConfigError)
    assert "cuda_device must be given" in raised(lambda: Flags(1, None, "gdr"), ConfigError)
