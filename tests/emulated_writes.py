"""A libfabric that answers, when asked, that it makes messages of RDMA writes."""

from __future__ import annotations

import ctypes

import pytest

from moecomm.transport.efa import abi, endpoint
from moecomm.transport.efa.fabrics import Option

EMULATED = Option("FI_OPT_EFA_EMULATED_WRITE", abi.FI_OPT_EFA_EMULATED_WRITE, False)


def let_writes_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = endpoint.call

    def call(fid: int, ops: int, place: int, *arguments: int) -> int:
        if (ops, place) == (abi.EP_OPS, abi.EP_OPS_GETOPT) and arguments[1] == EMULATED.number:
            ctypes.c_bool.from_address(arguments[2]).value = True
            return 0
        return real(fid, ops, place, *arguments)

    monkeypatch.setattr(endpoint, "call", call)
