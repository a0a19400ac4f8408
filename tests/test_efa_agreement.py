"""What an interface needs for writes with immediates, and what one rank's lacks: known to all ranks
when the engine is made, before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from emulated_writes import EMULATED, let_writes_be_emulated
from engines import options
from threads import run_threads

import moecomm as mc
from moecomm.transport.efa import abi, fabrics, open_engine, openers
from moecomm.transport.efa.fabrics import Fabric
from moecomm.transport.efa.library import Library, set_word, word
from moecomm.transport.efa.opener import FabricOpener
from moecomm.transport.engine import TransferEngine


class Changed:
    """A libfabric that says something else of its interfaces."""

    def __init__(self, real: Library, change: Callable[[int], None]) -> None:
        self._real, self._change = real, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def interfaces(self, fabric: Fabric, on_gpu: bool) -> tuple[int, list[int]]:
        code, infos = self._real.interfaces(fabric, on_gpu)
        for info in infos:
            self._change(info)
        return code, infos


def no_immediates(info: int) -> None:
    set_word(word(info, abi.INFO_DOMAIN_ATTR), abi.DOMAIN_CQ_DATA_SIZE, 0)


def receives_for_immediates(info: int) -> None:
    set_word(info, abi.INFO_MODE, word(info, abi.INFO_MODE) | abi.FI_RX_CQ_DATA)


def nothing(info: int) -> None: ...


def opener(change: Callable[[int], None] = nothing, fabric: Fabric = fabrics.TCP) -> FabricOpener:
    real = openers("tcp")[0]
    library: Any = Changed(real._library, change)
    return FabricOpener(library, fabric, real.device)


def errors_of(first: Any, second: Any) -> list[mc.MoecommError]:
    """What each rank raises whose interfaces these are."""

    def work(group: mc.Group) -> mc.MoecommError:
        with pytest.raises(mc.MoecommError) as caught:
            TransferEngine(group, [(first, second)[group.rank]], options=options())
        return caught.value

    return run_threads(work, 2)


def check(errors: list[mc.MoecommError], reason: str) -> None:
    """Rank 1 cannot, and says why; rank 0 says so of rank 1."""
    assert isinstance(errors[1], mc.TransportUnavailable)
    assert reason in str(errors[1])
    assert isinstance(errors[0], mc.TransportError)
    assert errors[0].peer == 1
    assert str(errors[0]) == f"rank 1 failed in open: TransportUnavailable: {errors[1]}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_immediates, "carries immediates of 0 bytes, 4 are needed"),
        (
            receives_for_immediates,
            "wants a receive for every write with an immediate (FI_RX_CQ_DATA): the device or its "
            "firmware cannot do without, or FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 is set",
        ),
    ],
)
def test_f09_one_end_without_immediates_is_refused_on_both(
    change: Callable[[int], None], reason: str
) -> None:
    check(errors_of(opener(), opener(change)), reason)


def test_f09_one_end_that_emulates_is_refused_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 1 asks, and is told that its writes would be messages."""
    let_writes_be_emulated(monkeypatch)
    weak = opener(fabric=dataclasses.replace(fabrics.TCP, must_be_off=(EMULATED,)))
    check(errors_of(opener(), weak), "would emulate RDMA writes by messages")


def test_f09_ends_that_speak_different_protocols_are_refused_on_both() -> None:
    """As where one has the device, or its firmware, and the other stands in for it."""
    other = opener(fabric=dataclasses.replace(fabrics.TCP, name="efa-direct"))
    for error in errors_of(opener(), other):
        assert isinstance(error, mc.ConfigError)
        assert str(error) == (
            "kinds of NICs: tcp on rank 0, efa-direct on rank 1; must be equal on all ranks"
        )


def test_f09_an_end_without_an_interface_is_known_to_the_other() -> None:
    def work(group: mc.Group) -> mc.MoecommError:
        with pytest.raises(mc.MoecommError) as caught:
            open_engine(group, "tcp", options=options(), cuda_device=0 if group.rank else None)
        return caught.value

    check(run_threads(work, 2), "takes no GPU memory")
