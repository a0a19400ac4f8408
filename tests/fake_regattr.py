"""``fi_mr_regattr`` for memory that no stand-in takes: what it was asked, and an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from moecomm.transport.efa import abi, nic
from moecomm.transport.efa.library import half, set_word, word
from moecomm.transport.engine.blocks import Block

KEY, DESC = 0xABC000, 0xDE5C


@dataclass(frozen=True)
class Asked:
    """A registration. ``address`` and ``nbytes`` are those of its ``iovec``; with the flag for one,
    ``dmabuf`` is the descriptor, offset, length and base of its ``fi_mr_dmabuf`` instead."""

    iface: int
    device: int
    flags: int
    address: int = 0
    nbytes: int = 0
    dmabuf: tuple[int, int, int, int] | None = None


def _read(attr: int, flags: int) -> Asked:
    iface, device = half(attr, abi.MR_ATTR_IFACE), half(attr, abi.MR_ATTR_DEVICE)
    place = word(attr, abi.MR_ATTR_IOV)
    if flags & abi.FI_MR_DMABUF:
        places = abi.DMABUF_OFFSET, abi.DMABUF_LEN, abi.DMABUF_BASE
        numbers = [word(place, offset) for offset in places]
        return Asked(iface, device, flags, dmabuf=(half(place, abi.DMABUF_FD), *numbers))
    nbytes = word(place, abi.IOV_LEN)
    return Asked(iface, device, flags, word(place, abi.IOV_BASE), nbytes)


@dataclass
class Fake:
    """``asked``: what was registered inside. ``closed``: how many of those are no longer.
    ``refuse``: the error number that every registration gets; 0: none."""

    asked: list[Asked]
    closed: int = 0
    refuse: int = 0


@contextlib.contextmanager
def recorded() -> Iterator[Fake]:
    """Registrations of GPU memory, and those that are to be refused, do not reach the provider."""
    real, made, fake = nic.call, [], Fake([])

    def call(fid: int, ops: int, place: int, *arguments: int) -> int:
        if (ops, place) == (abi.DOMAIN_MR, abi.MR_OPS_REGATTR):
            attr, flags, out = arguments
            asked = _read(attr, flags)
            if fake.refuse:
                return -fake.refuse
            if asked.iface or flags:
                fake.asked.append(asked)
                made.append(Block(64))
                set_word(made[-1].address, abi.MR_MEM_DESC, DESC + len(made))
                set_word(made[-1].address, abi.MR_KEY, KEY + len(made))
                set_word(out, 0, made[-1].address)
                return 0
        if fid in [block.address for block in made]:
            fake.closed += 1
            return 0
        return real(fid, ops, place, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nic, "call", call)
        yield fake
