"""What differs between libfabric's providers, as data.

How AWS's EFA differs from the providers that stand in for it, and where that is taken care of:

 1. hints: ``Fabric`` below; one NIC, one domain, one completion queue, one endpoint (``nic.py``)
 2. two fabrics of one provider: ``efa-direct`` is preferred to ``efa``; contexts of 64 bytes that
    live until completion (``hot.py``); peers in both address vectors before traffic: the engine
    connects all ranks, together, before any of them may write
 3. silent emulation of writes by messages: one iovec per write, ``options`` force device RDMA, and
    ``must_be_off`` is asked once the endpoint is enabled
 4. the first write to a peer shakes hands: EAGAIN until both sides poll; the loop always polls
 5. no order between writes: receivers count immediates
 6. a completion means that the source may change, not that a remote kernel sees the data
 7. a write with an immediate needs no receive; the completion queue has no overrun protection:
    it is sized for, and the engine's credits keep within, tx_depth + rx_depth
 8. GPU memory: ``FI_HMEM``, ``options`` keep CUDA calls and shared memory out of the worker
 9. the longest write is asked for (``FI_OPT_MAX_RMA_SIZE``); bursts of 32, then polling
10. errors come by ``fi_cq_readerr`` (``hot.py``)
11. variables of the environment that change all this are logged (``VARIABLES``)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moecomm.transport.efa import abi

# What is asked of every provider: EFA's registration rules, whether it needs them or not.
_REGISTRATION: Final = abi.FI_MR_VIRT_ADDR | abi.FI_MR_ALLOCATED | abi.FI_MR_PROV_KEY
_BASE: Final = abi.FI_MSG | abi.FI_RMA

VARIABLES: Final = (
    "FI_EFA_IFACE", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "FI_EFA_ENABLE_SHM_TRANSFER",
    "FI_EFA_USE_UNSOLICITED_WRITE_RECV", "FI_PROVIDER", "FI_HMEM_CUDA_USE_GDRCOPY",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Option:
    """An endpoint option of type bool, set before the endpoint is enabled.

    ``required``: a provider that does not know it cannot be used.
    """

    name: str
    number: int
    value: bool
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How to ask libfabric for one kind of network.

    Args:
        name: in ``MOECOMM_FABRIC``.
        provider: libfabric's name of the provider.
        fabric: name of one of its fabrics; ``None``: any.
        caps: beyond messages and RMA.
        modes: what we offer to do for the provider.
        node: local address to bind to, for providers over IP.
        options: see ``Option``.
        must_be_off: options of type bool that must read false once the endpoint is enabled.
        op_flags: when a write counts as done, beyond the provider's default.
        batches: whether ``FI_MORE`` saves doorbells.
        on_gpus: whether it takes GPU memory.
    """

    name: str
    provider: str
    fabric: str | None = None
    caps: int = 0
    modes: int = abi.FI_CONTEXT | abi.FI_CONTEXT2
    node: str | None = None
    options: tuple[Option, ...] = ()
    must_be_off: tuple[Option, ...] = ()
    op_flags: int = 0
    batches: bool = False
    on_gpus: bool = False

    @property
    def mr_mode(self) -> int:
        """Registration modes offered, without GPU memory."""
        return _REGISTRATION | abi.FI_MR_LOCAL

    @property
    def all_caps(self) -> int:
        """Capabilities asked for, without GPU memory."""
        return _BASE | self.caps


_EFA_OPTIONS: Final = (
    Option("FI_OPT_SHARED_MEMORY_PERMITTED", abi.FI_OPT_SHARED_MEMORY_PERMITTED, False),
    Option("FI_OPT_CUDA_API_PERMITTED", abi.FI_OPT_CUDA_API_PERMITTED, False),
)
_EMULATED: Final = (Option("FI_OPT_EFA_EMULATED_WRITE", abi.FI_OPT_EFA_EMULATED_WRITE, False),)

EFA_DIRECT: Final = Fabric(
    name="efa-direct",
    provider="efa",
    fabric="efa-direct",
    caps=abi.FI_LOCAL_COMM | abi.FI_REMOTE_COMM,
    options=_EFA_OPTIONS,
    must_be_off=_EMULATED,
    batches=True,
    on_gpus=True,
)
EFA: Final = Fabric(
    name="efa",
    provider="efa",
    fabric="efa",
    caps=abi.FI_LOCAL_COMM | abi.FI_REMOTE_COMM,
    options=(
        *_EFA_OPTIONS,
        Option("FI_OPT_EFA_USE_DEVICE_RDMA", abi.FI_OPT_EFA_USE_DEVICE_RDMA, True, required=True),
    ),
    must_be_off=_EMULATED,
    on_gpus=True,
)
# Without FI_DELIVERY_COMPLETE tcp calls a write done that the peer then refuses (a wrong key).
TCP: Final = Fabric(name="tcp", provider="tcp", node="127.0.0.1", op_flags=abi.FI_DELIVERY_COMPLETE)
SHM: Final = Fabric(name="shm", provider="shm")
# Over soft-RoCE the nearest to efa that needs no hardware: its registration rules, 4 bytes of
# immediate, real key errors, EAGAIN. Its devices bind to the addresses that they have.
VERBS: Final = Fabric(name="verbs", provider="verbs;ofi_rxm")

# By name; "efa" takes the first of its two fabrics that is there.
FABRICS: Final[dict[str, tuple[Fabric, ...]]] = {
    "efa": (EFA_DIRECT, EFA),
    "efa-direct": (EFA_DIRECT,),
    "tcp": (TCP,),
    "shm": (SHM,),
    "verbs": (VERBS,),
}
AUTO: Final = "auto"
