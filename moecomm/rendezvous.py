"""How the ranks that a launcher started find the store: ``Group.from_env``, ``from_torch``,
``from_mpi``.

``from_env`` reads, in this order, the rank and the number of ranks from

=============  =========================================================================
torchrun       ``RANK``, ``WORLD_SIZE`` (also what many hand-written scripts set)
Open MPI       ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``
MPICH, PMI     ``PMI_RANK``, ``PMI_SIZE``
Slurm          ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NTASKS``
=============  =========================================================================

Rank 0 serves the store; the place where the others look for it is the first of

1. ``MOECOMM_STORE=host:port``: the base port is ``port``;
2. ``MASTER_ADDR``, ``MASTER_PORT``: the base port is ``MASTER_PORT + 1``, because torchrun's agent,
   or ``torch.distributed`` itself, listens on ``MASTER_PORT``;
3. all ranks on one machine: loopback, base port from the launcher's job id;
4. Slurm: the first node of the job, base port from the job id.

Rank 0 listens on the first free port of the 64 that start at the base port. The others try them
all until one greets them with this job's name, so a neighbouring job that has taken some of them
does no harm. The n-th ``from_env`` of a process meets the n-th of the others, each at a store of
its own. The process that serves must outlive every group that uses its store, subgroups included.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from moecomm import env
from moecomm.addresses import is_loopback, machine, own_addresses
from moecomm.errors import (
    ConfigError,
    PeerTimeout,
    StateError,
    TransportError,
    TransportUnavailable,
)
from moecomm.group import Group
from moecomm.store import TcpStore
from moecomm.store_local import LocalStore
from moecomm.store_server import StoreServer, loopback_host

NUM_PORTS: Final = 64
_MESSAGE_BYTES: Final = 1024  # of the one exchange through torch; unused ones are zero
_calls = itertools.count(1)


class Launcher(NamedTuple):
    """What a launcher says about this process."""

    name: str
    rank: int
    size: int
    one_machine: bool
    job: str


def from_env(timeout_s: float) -> Group:
    """See the module; ``Group.from_env`` is the public name."""
    launcher = find_launcher()
    if launcher.size == 1 and env.get("STORE") is None:
        return _alone()
    host, ports = store_address(launcher)
    job = f"{launcher.job} {launcher.size} #{next(_calls)}"
    server = _serve(host, ports, job) if launcher.rank == 0 else None
    addresses = [(host, server.port)] if server else [(host, port) for port in ports]
    try:
        store = TcpStore.connect(addresses, job=job, server=server, timeout_s=timeout_s)
    except TransportError as error:
        raise _no_store(launcher.rank) from error
    return Group(launcher.rank, launcher.size, store, on_close=store.close)


def find_launcher() -> Launcher:
    """Read the launcher's variables; ``ConfigError`` names those that are missing or wrong."""
    get = os.environ.get
    slurm_size = "SLURM_STEP_NUM_TASKS" if get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    known = (
        ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("Slurm", "SLURM_PROCID", slurm_size, ""),
    )
    for name, rank_name, size_name, local_name in known:
        if not get(rank_name) or not get(size_name):
            continue
        rank, size = _number(rank_name), _number(size_name)
        if not 0 <= rank < size:
            raise ConfigError(f"{rank_name}={rank}: must be from 0 to {size_name}={size} - 1")
        one_machine = get(local_name) == str(size) or (
            name == "Slurm" and "1" in (get("SLURM_STEP_NUM_NODES"), get("SLURM_NNODES"))
        )
        return Launcher(name, rank, size, one_machine, _job_name(name, one_machine))
    names = "; ".join(f"{name}: {rank}, {size}" for name, rank, size, _ in known)
    raise ConfigError(f"no launcher's variables are set ({names}); use torchrun, mpirun or srun")


def store_address(launcher: Launcher) -> tuple[str, list[int]]:
    """Host and candidate ports of the store, by the rule at the top of this module."""
    override, master = env.get("STORE"), os.environ.get("MASTER_ADDR")
    if override is not None:
        host, port = split_host_port(override)
        return host, _ports(port)
    base = 20000 + zlib.crc32(launcher.job.encode()) % 10000  # below Linux's ephemeral ports
    if master:
        port = _number("MASTER_PORT") + 1 if os.environ.get("MASTER_PORT") else base
        return master, _ports(port)
    if launcher.one_machine:
        return loopback_host(), _ports(base)
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if launcher.name == "Slurm" and nodes:
        return first_node(nodes), _ports(base)
    raise ConfigError(
        f"MOECOMM_STORE is not set: {launcher.name} does not say where rank 0 runs when there are "
        "several machines; set MOECOMM_STORE=host:port (or MASTER_ADDR and MASTER_PORT) on all "
        "ranks, or use Group.from_mpi(comm)"
    )


def split_host_port(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6 address]:port``."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+)", text.strip())
    if match is None or not 0 < int(match[3]) < 65536:
        raise ConfigError(f"MOECOMM_STORE={text!r}: must be host:port, IPv6 as [address]:port")
    return match[1] or match[2], int(match[3])


def first_node(nodes: str) -> str:
    """First host of a Slurm node list: ``gpu[003-005,9],x1`` → ``gpu003``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r}: names no node")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def from_mpi(comm: Any, timeout_s: float) -> Group:
    """See ``Group.from_mpi``."""
    for name in ("Get_rank", "Get_size", "allgather"):
        if not callable(getattr(comm, name, None)):
            raise ConfigError(f"comm={comm!r}: must be a communicator with {name}()")
    return _join(int(comm.Get_rank()), int(comm.Get_size()), comm.allgather, timeout_s)


def from_torch(process_group: Any, timeout_s: float) -> Group:
    """See ``Group.from_torch``."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise TransportUnavailable("Group.from_torch: torch is not installed") from error
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("Group.from_torch: call torch.distributed.init_process_group first")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ConfigError("process_group: this rank is not a member of it")
    backend = str(dist.get_backend(process_group))
    device = "cpu" if any(name in backend for name in ("gloo", "mpi", "cpu")) else "cuda"

    def all_gather(value: bytes) -> list[bytes]:
        mine = torch.tensor(list(value.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8).to(device)
        theirs = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(theirs, mine, group=process_group)
        return [bytes(t.cpu().tolist()).rstrip(b"\0") for t in theirs]

    group = _join(rank, size, all_gather, timeout_s)
    if "nccl" in backend:  # its ranks work on GPUs, each on the one that it has made current
        group.device = f"cuda:{torch.cuda.current_device()}"
    return group


def _join(
    rank: int, size: int, all_gather: Callable[[bytes], list[bytes]], timeout_s: float
) -> Group:
    """One exchange of addresses through somebody else's collective, then our own store."""
    if size == 1:
        return _alone()
    server, lines = None, [machine()]
    if rank == 0:
        job = secrets.token_hex(8)
        try:
            server = StoreServer(None, 0, job=job)
            lines += [job, str(server.port), *own_addresses()]
        except OSError as error:
            lines += ["", str(error)]
    try:
        told = [bytes(m).decode().split("\n") for m in all_gather(_join_lines(lines))]
        _, job, port_or_error, *hosts = told[0]
        if not job:
            raise TransportError(
                f"rank 0 cannot serve a store: {port_or_error}", peer=0, operation="bootstrap"
            )
        if all(t[0] == told[0][0] for t in told):
            hosts = ["127.0.0.1", "::1"]
        addresses = [(host, int(port_or_error)) for host in hosts]
        store = TcpStore.connect(addresses, job=job, server=server, timeout_s=timeout_s)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Group(rank, size, store, on_close=store.close)


def _alone() -> Group:
    return Group(0, 1, LocalStore())


def _no_store(rank: int) -> PeerTimeout:
    return PeerTimeout("bootstrap", 0, 1, 0, rank=rank)


def _serve(host: str, ports: Sequence[int], job: str) -> StoreServer:
    listen_on = host if is_loopback(host) else None
    reason: OSError | None = None
    for port in ports:
        try:
            return StoreServer(listen_on, port, job=job)
        except OSError as error:
            reason = error
    raise TransportError(
        f"rank 0 cannot listen on any of ports {ports[0]} to {ports[-1]}: {reason}",
        transport="store",
        operation="listen",
    )


def _ports(base: int) -> list[int]:
    first = base if base + NUM_PORTS <= 65536 else base - NUM_PORTS - 1
    return list(range(first, first + NUM_PORTS))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a number")
    return int(text)


def _job_name(launcher: str, one_machine: bool) -> str:
    """Equal on all ranks of a job, different from its neighbours'. torchrun's restart count is
    left out: its agents do not agree on it after one of them restarts alone."""
    names = {
        "torchrun": ("MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        "Open MPI": ("PMIX_NAMESPACE",),
        "MPICH": ("PMI_JOBID",),
        "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    }[launcher]
    values = [os.environ[name] for name in names if os.environ.get(name)]
    if not values and one_machine and env.get("STORE") is None:
        values = [str(os.getppid())]  # ranks that mpirun started directly share their parent
    return " ".join([launcher, *values])


def _join_lines(lines: Sequence[str]) -> bytes:
    """As many lines as fit into the exchange."""
    kept, used = [], 0
    for line in lines:
        used += len(line.encode()) + 1
        if used <= _MESSAGE_BYTES:
            kept.append(line)
    return "\n".join(kept).encode()
