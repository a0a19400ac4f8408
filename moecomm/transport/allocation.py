"""What memories of several ranks have in common: sizes that all agree on, regions found again, and
why a network interface may refuse them."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable, Sequence
from typing import Any, Final

from moecomm.errors import ConfigError
from moecomm.transport.base import Region

MAX_BYTES: Final = 1 << 47  # of one address space


def refusal(nbytes: object) -> str:
    """Why ``nbytes`` is no size; empty when it is one."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < MAX_BYTES:
        return f"nbytes={nbytes!r}: must be an integer from 1 to 2^47"
    return ""


def agree_on_size(told: Sequence[dict[str, Any]]) -> None:
    """Raise on every rank what one of them must not do."""
    for rank, message in enumerate(told):
        if message.get("refused"):
            raise ConfigError(f"rank {rank}: {message['refused']}")
    for rank, message in enumerate(told):
        if message["nbytes"] != told[0]["nbytes"]:
            raise ConfigError(
                f"nbytes: rank 0 allocates {told[0]['nbytes']}, rank {rank} {message['nbytes']}; "
                "must be equal on all ranks"
            )


def find_region(allocated: Iterable[Region], region: Region | None) -> Region:
    """``region``, one of those ``allocated``; ``None``: the only one. Else ``ConfigError``."""
    regions = list(allocated)
    if region is None:
        if len(regions) != 1:
            raise ConfigError(
                f"region=None: means the only allocation, of which there are {len(regions)}"
            )
        return regions[0]
    if region not in regions:
        raise ConfigError(f"region={region}: must be one that allocate returned")
    return region


def registration_hint(code: int, nbytes: int, *, on_gpu: bool) -> str:
    """What usually helps where a network interface refuses memory with the error number ``code``;
    to be appended to an error's text."""
    if code == errno.ENOMEM:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return f"; {nbytes} bytes must be locked, and `ulimit -l` allows {shown}"
    if on_gpu:
        return "; GPU memory needs a driver with dma-buf support, or the nvidia-peermem module"
    return ""
