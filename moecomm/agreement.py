"""All ranks must mean the same exchange: configurations are compared before anything is built."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.group import Group


def agree(group: Group, cfg: MoeConfig, extra: dict[str, Any], timeout_s: float) -> None:
    """Exchange ``cfg`` and ``extra`` (what else must match) and compare field by field.

    Raises:
        ConfigError: on every rank, naming the first field that differs, its values and their ranks.
        PeerTimeout: a rank did not come.
    """
    mine = dataclasses.asdict(cfg) | extra
    everyone = [json.loads(blob) for blob in group.all_gather(json.dumps(mine).encode(), timeout_s)]
    for field in mine:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_by_value.setdefault(repr(theirs.get(field)), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = (f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            raise ConfigError(f"{field} differs between ranks: {'; '.join(parts)}")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
