"""What completion statuses and error numbers mean, in words."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from moecomm.errors import TransportError
from moecomm.transport.verbs.library import TRANSPORT


class Status(NamedTuple):
    """An ``IBV_WC_*`` name, and what usually is behind it."""

    name: str
    meaning: str


# enum ibv_wc_status, in order
STATUSES: Final = (
    Status("SUCCESS", "it went well"),
    Status("LOC_LEN_ERR", "more bytes than the port, or a posted receive, can take"),
    Status("LOC_QP_OP_ERR", "the queue pair cannot do this request"),
    Status("LOC_EEC_OP_ERR", "the end-to-end context cannot do this request"),
    Status("LOC_PROT_ERR", "the local memory is not registered, or not for this"),
    Status("WR_FLUSH_ERR", "not done, since an earlier request on this connection failed"),
    Status("MW_BIND_ERR", "a memory window could not be bound"),
    Status("BAD_RESP_ERR", "the peer answered with something unexpected"),
    Status("LOC_ACCESS_ERR", "the peer wrote to memory that is not open to it"),
    Status("REM_INV_REQ_ERR", "the peer refuses such a request"),
    Status("REM_ACCESS_ERR", "the peer's memory is not registered there, or not for this"),
    Status("REM_OP_ERR", "the peer failed to do the request"),
    Status("RETRY_EXC_ERR", "the peer does not answer: it has ended, or the network lost it"),
    Status("RNR_RETRY_EXC_ERR", "the peer had no receive posted for too long"),
    Status("LOC_RDD_VIOL_ERR", "the reliable datagram domains do not match"),
    Status("REM_INV_RD_REQ_ERR", "the peer refuses this reliable datagram"),
    Status("REM_ABORT_ERR", "the peer aborted the request"),
    Status("INV_EECN_ERR", "no such end-to-end context"),
    Status("INV_EEC_STATE_ERR", "the end-to-end context is in the wrong state"),
    Status("FATAL_ERR", "the device has a fatal error"),
    Status("RESP_TIMEOUT_ERR", "an answer did not come in time"),
    Status("GENERAL_ERR", "some other error"),
    Status("TM_ERR", "tag matching failed"),
    Status("TM_RNDV_INCOMPLETE", "a tagged rendezvous is incomplete"),
)
WR_FLUSH_ERR: Final = 5
REM_ACCESS_ERR: Final = 10
RETRY_EXC_ERR: Final = 12


def explain(code: int, detail: int = 0) -> str:
    """One line for a completion's status (``detail``: the device's own number), or, below 0, for
    a negative error number."""
    if code < 0:
        return f"{os.strerror(-code)} (errno {-code})"
    if code >= len(STATUSES):
        return f"unknown completion status {code} (device's code {detail:#x})"
    status = STATUSES[code]
    return f"{status.meaning} (IBV_WC_{status.name}, device's code {detail:#x})"


def failure(where: str, operation: str, peer: int, code: int, detail: int = 0) -> TransportError:
    """The error of a failed request: ``where`` names device and port."""
    return TransportError(
        f"{where}: {operation} to peer {peer} failed: {explain(code, detail)}",
        transport=TRANSPORT,
        peer=peer,
        operation=operation,
        code=abs(code),
    )
