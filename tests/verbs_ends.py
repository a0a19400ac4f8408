"""Two open RDMA ports in one process, posted to and polled through the engine's hooks."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

from moecomm.transport.base import Region
from moecomm.transport.engine import records
from moecomm.transport.engine.provider import Registration, Sizing
from moecomm.transport.verbs.nic import VerbsNic

TIMEOUT_S = 30.0
SIZING = Sizing(num_peers=3, tx_depth=64, rx_depth=96, message_bytes=200, num_messages=40)
_Hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Post(ctypes.Structure):
    """A record of ``POST_BYTES``."""

    _fields_ = (
        ("peer", ctypes.c_uint32),
        ("nic", ctypes.c_uint16),
        ("kind", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("imm", ctypes.c_uint32),
        ("context", ctypes.c_uint32),
        ("local", ctypes.c_uint64),
        ("local_key", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("remote_key", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
    )


class Event(ctypes.Structure):
    """A record of ``EVENT_BYTES``."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("imm", ctypes.c_uint32),
        ("context", ctypes.c_uint64),
        ("code", ctypes.c_int64),
        ("detail", ctypes.c_uint64),
    )


class End:
    """A port with registered memory."""

    def __init__(self, nic: VerbsNic, nbytes: int) -> None:
        self.nic = nic
        self._memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = Region(address, nbytes)
        self.registration = nic.register(self.region)
        self._post, self._poll = _Hook(nic.hooks.post), _Hook(nic.hooks.poll)

    def post(self, *posts: Post) -> int:
        array = (Post * len(posts))(*posts)
        return self._post(self.nic.hooks.state, ctypes.addressof(array), len(posts))

    def poll(self, capacity: int = 64) -> list[Event]:
        array = (Event * capacity)()
        count = self._poll(self.nic.hooks.state, ctypes.addressof(array), capacity)
        assert count >= 0, self.nic.explain(count, 0)
        return [Event.from_buffer_copy(array[n]) for n in range(count)]

    def write(self, other: End, peer: int, context: int, nbytes: int, imm: int | None = 0) -> Post:
        """Write the first bytes to the same place of ``other``."""
        return self.write_to(other.registration, peer, context, nbytes, imm)

    def write_to(
        self, to: Registration, peer: int, context: int, nbytes: int, imm: int | None = 0
    ) -> Post:
        """Write the first bytes to the beginning of a peer's region."""
        return Post(
            peer=peer,
            kind=records.WRITE,
            flags=0 if imm is None else records.HAS_IMM,
            imm=imm or 0,
            context=context,
            local=self.region.address,
            local_key=self.registration.local_key,
            nbytes=nbytes,
            remote=to.remote_base,
            remote_key=to.remote_key,
        )

    def signal(self, peer: int, context: int, nbytes: int, imm: int = 0) -> Post:
        """A write of nothing with an immediate; ``nbytes`` is ignored."""
        return Post(peer=peer, kind=records.WRITE, flags=records.HAS_IMM, imm=imm, context=context)

    def message(self, peer: int, context: int, nbytes: int) -> Post:
        """Send the first bytes."""
        return Post(
            peer=peer,
            kind=records.SEND,
            context=context,
            local=self.region.address,
            local_key=self.registration.local_key,
            nbytes=nbytes,
        )

    def collect(self, count: int) -> list[Event]:
        """The next ``count`` events."""
        events: list[Event] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(events) < count:
            events += self.poll()
            assert time.monotonic() < deadline, f"{len(events)} of {count} events"
        return events


def connect(*nics: VerbsNic) -> None:
    """Connect all to all, themselves included; each in a thread, as in ranks."""
    addresses = [nic.address() for nic in nics]
    errors: list[BaseException] = []

    def one(nic: VerbsNic) -> None:
        try:
            nic.connect(addresses, TIMEOUT_S)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(nic,)) for nic in nics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
