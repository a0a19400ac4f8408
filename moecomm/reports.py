"""Status records of kernels as the errors that users see."""

from __future__ import annotations

from collections.abc import Sequence

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, MoecommError, Overflow, PeerTimeout
from moecomm.kernels.args import CODE_BAD_EXPERT, PHASES, STATUS_OVERFLOW, STATUS_VALUE, Status


def failure_of(status: Status, at_fault: int | None = None) -> PeerTimeout:
    """Somebody did not come: noticed here, or told by the rank that noticed. ``at_fault``: whom to
    name, where that is better known than to the kernel that waited."""
    return PeerTimeout(
        PHASES[status.phase],
        status.peer if at_fault is None else at_fault,
        status.expected,
        status.seen,
        rank=status.rank,
        epoch=status.epoch,
    )


def take_report(cfg: MoeConfig, statuses: Sequence[Status]) -> tuple[MoecommError, int] | None:
    """What concerns one handle, and its slot; the record is free again afterwards."""
    for which, error_of in ((STATUS_VALUE, value_error_of), (STATUS_OVERFLOW, overflow_of)):
        status = statuses[which]
        if status.code:
            error = error_of(cfg, status)
            status.code = 0
            return error, int(status.slot)
    return None


def value_error_of(cfg: MoeConfig, status: Status) -> ConfigError:
    """A value in the caller's arrays that only the device could see."""
    value = status.seen - (1 << 64) if status.seen >> 63 else status.seen
    if status.code == CODE_BAD_EXPERT:
        token, slot = divmod(status.peer, cfg.top_k)
        return bad_expert(cfg, token, slot, value)
    return ConfigError(f"num_tokens={value}: must be from 0 to the {status.expected} rows of x")


def bad_expert(cfg: MoeConfig, token: int, slot: int, value: int) -> ConfigError:
    return ConfigError(
        f"topk_idx[{token}, {slot}]={value}: must be -1 (no expert) or from 0 to "
        f"num_experts-1={cfg.num_experts - 1}"
    )


def overflow_of(cfg: MoeConfig, status: Status) -> Overflow:
    where = "expert" if cfg.layout == "batched" else "rank"
    return Overflow(status.peer, status.expected, status.seen, where=where)
