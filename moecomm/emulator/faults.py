"""``Faults``: what a simulation does wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of one simulation; the default has none.

    Args:
        dead_rank: this rank stops being scheduled, as if its process had been killed ...
        dead_after_steps: ... after its kernels' threads have had so many turns. Its function is
            unwound, its result is ``None``.
        drop_nth_release: the n-th release of a flag (``st_release_sys``, ``red_release_sys_add``;
            counted over all ranks from 1, registered memory only) never arrives.
        duplicate_release: the n-th arrives twice: an addition adds again, a store is repeated up
            to a thousand turns later.
        delay_stores: plain stores to other ranks' registered memory are held back, each until a
            random later moment, at the latest until the thread's next release, fence or barrier.
    """

    dead_rank: int | None = None
    dead_after_steps: int = 0
    drop_nth_release: int | None = None
    duplicate_release: int | None = None
    delay_stores: bool = False

    def __post_init__(self) -> None:
        for name in ("dead_rank", "dead_after_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: must be at least 0")
        for name in ("drop_nth_release", "duplicate_release"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: releases are counted from 1")

    @property
    def touch_accesses(self) -> bool:
        """Whether kernels must be built so that the runtime sees their accesses."""
        return (
            self.delay_stores
            or self.drop_nth_release is not None
            or self.duplicate_release is not None
        )
