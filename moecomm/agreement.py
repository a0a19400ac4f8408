"""Set-up in step: ranks compare what they mean to do, and learn of each other's failures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, TransportError
from moecomm.group import Group

T = TypeVar("T")

SETUP_S: Final = 60.0  # a wait during set-up is at least this: a peer may be compiling its kernels


def agree(group: Group, cfg: MoeConfig, extra: dict[str, Any], timeout_s: float) -> None:
    """Exchange ``cfg`` and ``extra`` (what else must match) and compare field by field.

    Raises:
        ConfigError: on every rank, naming the first field that differs, its values and their ranks.
        PeerTimeout: a rank did not come.
    """
    mine = dataclasses.asdict(cfg) | extra
    if cfg.coded is not None:
        mine["codec"] = str(cfg.coded)  # with a hash of its functions
    everyone = [json.loads(blob) for blob in group.all_gather(json.dumps(mine).encode(), timeout_s)]
    for field in mine:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_by_value.setdefault(repr(theirs.get(field)), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = (f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            raise ConfigError(f"{field} differs between ranks: {'; '.join(parts)}")


def together(group: Group, what: str, step: Callable[[], T], timeout_s: float) -> T:
    """Call ``step`` and wait until every rank has; what it returned here.

    Raises:
        Exception: what ``step`` raised here.
        TransportError: it raised on another rank, which the message names.
        PeerTimeout: a rank did not come; ``phase`` is ``what``.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001  raised again once the others know
        error = caught
    text = "" if error is None else f"{type(error).__name__}: {error}"
    everyone = group.all_gather(text.encode(), timeout_s, what)
    if error is not None:
        raise error
    for rank, failed in enumerate(everyone):
        if failed:
            message = f"rank {rank} failed in {what}: {failed.decode()}"
            raise TransportError(message, peer=rank, operation=what)
    assert result is not None
    return result


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
