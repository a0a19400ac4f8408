"""What ranks compare when they allocate together."""

from __future__ import annotations

from typing import Any, Final

from moecomm.errors import ConfigError

MAX_BYTES: Final = 1 << 47  # of one address space


def refusal(nbytes: object) -> str:
    """Why ``nbytes`` is no size; empty when it is one."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < MAX_BYTES:
        return f"nbytes={nbytes!r}: must be an integer from 1 to 2^47"
    return ""


def agree_on_size(told: list[dict[str, Any]]) -> None:
    """Raise on every rank what one of them must not do."""
    for rank, message in enumerate(told):
        if "refused" in message:
            raise ConfigError(f"rank {rank}: {message['refused']}")
    for rank, message in enumerate(told):
        if message["nbytes"] != told[0]["nbytes"]:
            raise ConfigError(
                f"nbytes: rank 0 allocates {told[0]['nbytes']}, rank {rank} {message['nbytes']}; "
                "must be equal on all ranks"
            )
