"""Which GPU a rank uses when the caller only says ``"cuda"``."""

from __future__ import annotations

import logging
import os
from typing import Final

from moecomm import env
from moecomm.addresses import machine, process
from moecomm.cuda_driver import current_device, device_count
from moecomm.errors import ConfigError
from moecomm.group import Group

logger = logging.getLogger(__name__)

# What launchers call the number of a process on its machine.
LAUNCHERS: Final = (
    "LOCAL_RANK",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH
    "SLURM_LOCALID",
)


def choose_index(group: Group, given: int | None, timeout_s: float) -> int:
    """Number of this rank's GPU among those this process sees. Collective.

    ``given`` wins. Threads of one process, and a rank alone that no launcher started, get the
    GPU that is current in the calling thread. Processes get the one of their number on this
    machine: as the launcher says, else counted in the group; they share GPUs, in turn, where
    there are fewer.

    Raises:
        ConfigError: this process sees no GPU.
    """
    mine = f"{process()}|{machine()}".encode()
    everyone = [blob.split(b"|", 1) for blob in group.all_gather(mine, timeout_s)]
    if given is not None:
        return given
    count = device_count()
    if count == 0:
        raise ConfigError("device='cuda': this process sees no GPU")
    local = _launched_as()
    if group.size > 1 and len({name for name, _ in everyone}) == 1:
        local = None  # threads
    elif local is None and group.size > 1:
        here = [r for r, (_, where) in enumerate(everyone) if where == everyone[group.rank][1]]
        local = here.index(group.rank)
    index = (current_device() or 0) if local is None else local % count
    logger.info("rank %d: device 'cuda' is cuda:%d of %d", group.rank, index, count)
    return index


def _launched_as() -> int | None:
    found = env.integer("LOCAL_RANK", 0)
    for name in LAUNCHERS:
        text = os.environ.get(name, "")
        if found is None and text.isdigit():
            found = int(text)
    return found
