"""Who has which GPU, and whether GPUs reach each other: found out before anything is allocated.

Every rank sees every answer and so comes to the same verdict: what keeps one rank from taking part
is an error on all of them. GPUs are told apart by UUID, because each process numbers its own.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass

from moecomm.addresses import machine
from moecomm.cuda_driver import (
    attribute,
    call,
    device,
    device_count,
    device_name,
    device_uuid,
    driver,
)
from moecomm.errors import MoecommError, TransportUnavailable
from moecomm.group import Group
from moecomm.transport.descriptors import Mailbox

TRANSPORT = "transport='nvlink'"


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank says of itself.

    Attributes:
        host: name of its machine, for people.
        machine: equal for processes that reach each other's sockets.
        mailbox: name and password (hexadecimal) of its ``Mailbox``.
        uuid: of its GPU.
        name: of its GPU.
        closed: UUIDs of GPUs that it sees and whose memory its own cannot access.
        refusal: why it cannot take part; empty when it can.
    """

    host: str
    machine: str
    mailbox: tuple[str, str] = ("", "")
    uuid: str = ""
    name: str = ""
    closed: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def is_mig(self) -> bool:
        """Whether the GPU is a slice of one (MIG)."""
        return " MIG " in f"{self.name} "


def survey(group: Group, index: int, timeout_s: float, mailbox: Mailbox) -> list[Seat]:
    """Every rank's seat. Collective. ``mailbox``: this rank's.

    Raises:
        TransportUnavailable: ranks are on several machines, a GPU cannot share its memory, or
            GPUs cannot access each other's; on every rank, naming all of them.
        PeerTimeout: a rank did not come.
    """
    seat = dataclasses.replace(_look(index), mailbox=(mailbox.name, mailbox.password.hex()))
    mine = json.dumps(dataclasses.asdict(seat)).encode()
    told = [json.loads(blob) for blob in group.all_gather(mine, timeout_s, "allocate")]
    seats = [
        Seat(**{**m, "closed": tuple(m["closed"]), "mailbox": tuple(m["mailbox"])}) for m in told
    ]
    _check(seats)
    return seats


def closed_pairs(seats: list[Seat]) -> list[tuple[int, int]]:
    """Ranks (a, b) where the GPU of a cannot access the memory of b's."""
    return [
        (a, b)
        for a, seat in enumerate(seats)
        for b, other in enumerate(seats)
        if other.uuid in seat.closed or _apart(seat, other)
    ]


def _apart(seat: Seat, other: Seat) -> bool:
    """MIG slices have no peer access, whatever the driver says of their GPUs."""
    return seat.uuid != other.uuid and (seat.is_mig or other.is_mig)


def _look(index: int) -> Seat:
    seat = Seat(socket.gethostname(), machine())
    try:
        if not attribute(index, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            return dataclasses.replace(seat, refusal="its GPU has no virtual memory management")
        if not attribute(index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            return dataclasses.replace(
                seat, refusal="its GPU cannot share memory through file descriptors"
            )
        return dataclasses.replace(
            seat, uuid=device_uuid(index), name=device_name(index), closed=_closed(index)
        )
    except MoecommError as error:
        return dataclasses.replace(seat, refusal=str(error))


def _closed(index: int) -> tuple[str, ...]:
    ask = driver().cuDeviceCanAccessPeer
    others = [n for n in range(device_count()) if n != index]
    return tuple(device_uuid(n) for n in others if not call(ask, device(index), device(n)))


def _check(seats: list[Seat]) -> None:
    refusals = [f"rank {r}: {s.refusal}" for r, s in enumerate(seats) if s.refusal]
    if refusals:
        raise TransportUnavailable(f"{TRANSPORT}: {'; '.join(refusals)}")
    strangers = [r for r, s in enumerate(seats) if s.machine != seats[0].machine]
    if strangers:
        shown = ", ".join(f"rank {r} on {seats[r].host}" for r in strangers)
        raise TransportUnavailable(
            f"{TRANSPORT} joins processes of one machine that share its network namespace: rank 0 "
            f"is on {seats[0].host}, {shown}; between machines use 'verbs' or 'efa'"
        )
    closed = closed_pairs(seats)
    if not closed:
        return
    shown = ", ".join(f"{a}→{b}" for a, b in closed)
    if any(seats[a].is_mig or seats[b].is_mig for a, b in closed):
        raise TransportUnavailable(
            f"{TRANSPORT}: MIG slices have no access to each other's memory (ranks {shown}); "
            "turn MIG off, put the ranks on one slice, or use device='cpu'"
        )
    raise TransportUnavailable(
        f"{TRANSPORT}: GPUs without access to each other's memory: ranks {shown}; "
        "`nvidia-smi topo -p2p r` shows which GPUs have it"
    )
