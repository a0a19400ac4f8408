"""Every environment variable that moecomm reads, with its meaning.

Other modules read variables through this table only, so that ``moecomm doctor`` and the
documentation can list them all. Values are read at each call: a test or a launcher may change
them at any time before the object that uses them is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from moecomm.errors import ConfigError

PREFIX: Final = "MOECOMM_"
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


class Variable(NamedTuple):
    """One variable: its name without ``MOECOMM_``, what is used without it, what it does."""

    name: str
    default: str
    meaning: str

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


VARIABLES: Final = (
    Variable(
        "CACHE_DIR",
        "$XDG_CACHE_HOME/moecomm or ~/.cache/moecomm",
        "directory of compiled kernels; shared by all processes, may be shared by machines",
    ),
    Variable(
        "NO_COMPILE",
        "0",
        "1 forbids compiling: a kernel that is not in the cache is an error that names it",
    ),
    Variable(
        "CXX",
        "the first of $CXX, c++, g++, clang++ found",
        "C++ compiler that builds the kernels for the CPU emulator",
    ),
    Variable(
        "KERNELS",
        "cuda",
        "what kernels='auto' means: cuda, numba, or the path of kernels in Python",
    ),
    Variable(
        "NO_EARLY_START",
        "0",
        "1 launches every GPU kernel after the one before it has ended (no dependent launch)",
    ),
    Variable(
        "BOUNCE",
        "0",
        "1 makes ranks on CPUs carry bytes for a network through memory of their own, as GPUs do",
    ),
    Variable(
        "BOUNCE_IN_LINE",
        "0",
        "1 keeps a GPU's copies to and from a network's memory on the caller's stream",
    ),
    Variable(
        "NVSHMEM_NO_POINTERS",
        "0",
        "1 makes transport='nvshmem' put to every peer, also to those that kernels could store to",
    ),
    Variable(
        "NVSHMEM_CHUNK",
        "2 to 8, by the number of tokens and what lies between the ranks",
        "records, or returned rows, that one put of transport='nvshmem' carries",
    ),
    Variable(
        "POISON",
        "0",
        "1 fills buffers with 0x7F bytes (NaN in every float type) before first use",
    ),
    Variable(
        "LOCAL_RANK",
        "LOCAL_RANK of torchrun, or what Open MPI, MPICH or Slurm set",
        "which of its machine's ranks this process is: device='cuda' is that GPU",
    ),
    Variable(
        "FABRIC",
        "auto: efa where there is an EFA device, else tcp",
        "network of transport='efa': auto, efa, efa-direct, tcp, shm or verbs (libfabric's)",
    ),
    Variable(
        "FABRIC_ADDRESS",
        "127.0.0.1",
        "this machine's IP address that fabric tcp binds to; needed between machines",
    ),
    Variable(
        "NODE_SIZE",
        "what is within reach: ranks of one machine are one node",
        "so many ranks in a row count as a machine of their own, to try network transports on one",
    ),
    Variable(
        "NICS",
        "all EFA devices near the GPU; 1 with fabrics that stand in for efa",
        "network interfaces that a rank uses",
    ),
    Variable(
        "LIBFABRIC",
        "AWS's, the mpich wheel's or the system's, whichever has the fabric",
        "path of the libfabric.so.1 to load",
    ),
    Variable(
        "RDMA_PORTS",
        "every active RDMA port of the first one's kind",
        "RDMA ports to use, in order: mlx5_0,mlx5_1 or mlx5_0:2 for its second port",
    ),
    Variable(
        "RDMA_BOOTSTRAP",
        "datagrams",
        "how ranks of transport='verbs' connect: by datagrams, or over the group's store",
    ),
    Variable(
        "RDMA_TRAFFIC_CLASS",
        "0",
        "traffic class of RDMA packets, 0 to 255: what RoCE switches sort by",
    ),
    Variable(
        "RDMA_SERVICE_LEVEL",
        "0",
        "service level of RDMA connections, 0 to 15",
    ),
    Variable(
        "GID_INDEX",
        "RoCE v2 before v1, IPv4 before IPv6, the one most like the store's address",
        "which entry of the RDMA ports' address tables to use",
    ),
    Variable(
        "STORE",
        "MASTER_ADDR:MASTER_PORT of the launcher",
        "host:port where the ranks of Group.from_env meet; IPv6 as [::1]:29500",
    ),
)

_BY_NAME: Final[Mapping[str, Variable]] = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> str | None:
    """Return the text of ``MOECOMM_<name>``; ``None`` when it is unset or empty.

    A name that is not in ``VARIABLES`` is a mistake in this package: ``KeyError``.
    """
    return os.environ.get(_BY_NAME[name].full_name) or None


def flag(name: str) -> bool:
    """Return ``MOECOMM_<name>`` as a switch; ``False`` when unset.

    Raises:
        ConfigError: the text is none of 1/0, true/false, yes/no, on/off.
    """
    text = get(name)
    if text is None:
        return False
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"{PREFIX}{name}={text!r}: must be 1 or 0 (true/false, yes/no, on/off)")


def integer(name: str, low: int, high: int | None = None) -> int | None:
    """Return ``MOECOMM_<name>`` as an integer from ``low`` to ``high``; ``None`` when unset.

    Raises:
        ConfigError: the text is not such an integer.
    """
    text = get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < low or (high is not None and value > high):
        rule = f"must be an integer from {low}" + ("" if high is None else f" to {high}")
        raise ConfigError(f"{PREFIX}{name}={text!r}: {rule}")
    return value


def path(name: str) -> Path | None:
    """Return ``MOECOMM_<name>`` as an absolute path, ``~`` expanded; ``None`` when unset.

    Raises:
        ConfigError: ``~`` or ``~user`` names a home directory that does not exist here.
    """
    text = get(name)
    if text is None:
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{PREFIX}{name}={text!r}: no such home directory") from error
