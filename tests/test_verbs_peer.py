"""A peer that shares no code with this package: PyPI's ``ibverbs``, connected over a store and
spoken to in both directions. What both ends of ours got wrong alike would show here."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from verbs_ends import SIZING, TIMEOUT_S, End

from moecomm.store_local import LocalStore
from moecomm.transport.engine import records
from moecomm.transport.engine.provider import Registration
from moecomm.transport.verbs.bootstrap import Address, StoreBootstrap
from moecomm.transport.verbs.devices import Port, choose_ports
from moecomm.transport.verbs.handshake import Card, Name
from moecomm.transport.verbs.nic import VerbsNic

pytestmark = pytest.mark.nic
NBYTES = 4096
NONCE = b"stranger"
IMM = 0xFEDCBA98  # no two bytes alike: another byte order is another number
PREFIX = "test"


class Stranger:
    """A queue pair for writes and one for messages, as a peer of ours has them."""

    def __init__(self, port: Port, gid: int) -> None:
        import ibverbs as ib  # loads libibverbs, which is where a device is

        self.ib = ib
        (device,) = (d for d in ib.get_device_list() if d.name == port.device)
        self.port, self.gid_index = port.number, gid
        self.context = device.open()
        self.domain = self.context.alloc_pd()
        self.completions = self.context.create_cq(64)
        self.memory = ctypes.create_string_buffer(NBYTES)
        self.access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
        self.region = self.domain.reg_mr(ctypes.addressof(self.memory), NBYTES, self.access)
        self.ready = ctypes.create_string_buffer(8)
        self.ready_region = self.domain.reg_mr(ctypes.addressof(self.ready), 8, self.access)
        self.writes, self.messages = self._pair(), self._pair()

    def _pair(self) -> Any:
        queue = self.completions
        return self.domain.create_qp(self.ib.QPInitAttr(send_cq=queue, recv_cq=queue))

    def card(self) -> Card:
        port = self.context.query_port(self.port)
        return Card(
            write_qp=self.writes.qp_num,
            write_psn=77,
            message_qp=self.messages.qp_num,
            message_psn=78,
            mtu=int(port.active_mtu),
            lid=port.lid,
            gid=bytes(self.context.query_gid(self.port, self.gid_index).raw),
            ready_address=self.ready_region.addr,
            ready_key=self.ready_region.rkey,
        )

    def connect(self, store: LocalStore, theirs: Address) -> None:
        """What ``StoreBootstrap`` does on the other side."""

        def key(what: str, name: Name) -> str:
            return f"{PREFIX}/{name.mine.hex()}/{name.theirs.hex()}/{name.number}/{what}"

        name, mine = Name(NONCE, theirs.nonce), self.card()
        store.set(key("card", name), mine.to_bytes())
        card = Card.from_bytes(store.get(key("card", name.reversed), TIMEOUT_S))
        for pair, number, start, own in (
            (self.writes, card.write_qp, card.write_psn, mine.write_psn),
            (self.messages, card.message_qp, card.message_psn, mine.message_psn),
        ):
            info = self.ib.QPInfo(number, start, card.lid, card.gid, self.port, card.mtu)
            self.ib.connect_rc(
                pair, info, port=self.port, sgid_index=self.gid_index, access=self.access,
                local_psn=own,
            )  # fmt: skip
        store.set(key("connected", name), b"")
        store.get(key("connected", name.reversed), TIMEOUT_S)
        self.fill((1).to_bytes(8, "little"))
        self.write(8, card.ready_address, card.ready_key)
        deadline = time.monotonic() + TIMEOUT_S
        while self.ready.raw != (1).to_bytes(8, "little"):
            assert time.monotonic() < deadline, "their word did not come"

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.memory, data, len(data))

    def write(self, nbytes: int, address: int, key: int, imm: int | None = None) -> None:
        kinds = self.ib.WROpcode
        self._do(
            self.writes, nbytes,
            kinds.RDMA_WRITE if imm is None else kinds.RDMA_WRITE_WITH_IMM,
            remote_addr=address, rkey=key, imm_data=imm or 0,
        )  # fmt: skip

    def send(self, nbytes: int) -> None:
        self._do(self.messages, nbytes, self.ib.WROpcode.SEND)

    def _do(self, pair: Any, nbytes: int, opcode: int, **fields: int) -> None:
        request = self.ib.SendWR(
            sg_list=[self.ib.SGE(self.region, nbytes)],
            opcode=opcode,
            send_flags=self.ib.SendFlags.SIGNALED,
            **fields,
        )
        pair.post_send(request)
        self.completion()

    def receive(self, pair: Any) -> None:
        pair.post_recv(self.ib.RecvWR(sg_list=[self.ib.SGE(self.region, NBYTES)]))

    def completion(self) -> Any:
        """The next one, which went well."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := self.completions.poll(1)):
            assert time.monotonic() < deadline, "no completion"
        found[0].raise_for_status()
        return found[0]


@pytest.fixture
def both() -> Iterator[tuple[End, Stranger]]:
    """An end of ours and a stranger, connected."""
    store, port = LocalStore(), choose_ports()[0]
    nic = VerbsNic(port, SIZING, bootstrap=lambda: StoreBootstrap(store, PREFIX))
    ours = Address.from_bytes(nic.address())
    stranger = Stranger(port, nic._device.gid.index)
    told = Address(NONCE, ours.roce, ours.gid, ours.lid, 0, 0)
    thread = threading.Thread(target=stranger.connect, args=(store, ours))
    thread.start()
    try:
        nic.connect([told.to_bytes()], TIMEOUT_S)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        yield End(nic, NBYTES), stranger
    finally:
        nic.close()


def read(end: End, nbytes: int) -> bytes:
    return ctypes.string_at(end.region.address, nbytes)


def test_what_a_stranger_writes_and_sends(both: tuple[End, Stranger]) -> None:
    end, stranger = both
    for nbytes in (0, 8, 3000):
        data = bytes(n * 7 % 251 for n in range(nbytes))
        stranger.fill(data)
        stranger.write(nbytes, end.registration.remote_base, end.registration.remote_key, IMM)
        (arrived,) = end.collect(1)
        assert (arrived.kind, arrived.imm) == (records.ARRIVED, IMM)
        assert read(end, nbytes) == data
    for n in range(2 * SIZING.num_messages):  # receives are posted again
        text = f"message {n}".encode()
        stranger.fill(text)
        stranger.send(len(text))
        (came,) = end.collect(1)
        assert came.kind == records.RECEIVED
        assert ctypes.string_at(came.context, came.detail) == text


def test_what_a_stranger_gets(both: tuple[End, Stranger]) -> None:
    end, stranger = both
    place = Registration(0, stranger.region.rkey, stranger.region.addr)
    for nbytes in (0, 8, 65, 3000):  # inside the request, and from memory
        data = bytes(n * 5 % 251 + 1 for n in range(nbytes))
        ctypes.memmove(end.region.address, data, nbytes)
        stranger.receive(stranger.writes)
        assert end.post(end.write_to(place, 0, context=3, nbytes=nbytes, imm=IMM)) == 1
        arrived = stranger.completion()
        assert arrived.opcode == stranger.ib.WCOpcode.RECV_RDMA_WITH_IMM
        assert arrived.imm_data == IMM
        assert stranger.memory.raw[:nbytes] == data
        assert [(e.kind, e.context) for e in end.collect(1)] == [(records.SENT, 3)]
    ctypes.memmove(end.region.address, b"good day", 8)
    stranger.receive(stranger.messages)
    assert end.post(end.message(0, context=4, nbytes=8)) == 1
    came = stranger.completion()
    assert (came.opcode, came.byte_len) == (stranger.ib.WCOpcode.RECV, 8)
    assert stranger.memory.raw[:8] == b"good day"
    assert [(e.kind, e.context) for e in end.collect(1)] == [(records.SENT, 4)]
