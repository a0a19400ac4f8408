"""Small exchanges on one GPU, for compute-sanitizer: ``scripts/gpu-check`` runs this under it.

Ranks are threads of this process, since the sanitizer watches one. It may make kernels a hundred
times slower and run them one after the other. So each half comes when every rank's half before it
has ended: then no kernel waits for one that has not run yet. Tensors are copied and compared on the
host, so that the only kernels are ours.

    python tests/sanitize_case.py [CASE ...]
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from exchange import Case, compare_received, make_case
from gpu_exchange import tensor
from payload import assert_same_bits
from tensors import received_as_numpy, to_numpy
from threads import run_threads

import moecomm as mc

TIMEOUT_S = 300.0  # a kernel under the sanitizer
STEPS = 2  # the second one uses what the first has left
BASE: dict[str, Any] = {
    "num_experts": 7, "top_k": 3, "hidden": 144, "max_tokens": 9, "in_flight": 1, "num_sms": 3,
    "timeout_s": TIMEOUT_S,
}  # fmt: skip
FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "float8_e4m3fn", "scale_block": 16}
# Together: both wires and grains, all layouts and reductions, a cast, a cap, replicas, odd rows,
# and bytes that reach peers through the host.
CASES: dict[str, tuple[mc.MoeConfig, int, str | None]] = {
    "batched-lines": (mc.MoeConfig(**BASE, wire="lines"), 2, None),
    "batched-flags": (mc.MoeConfig(**BASE, wire="flags"), 2, None),
    "grouped-sender-lines": (mc.MoeConfig(**BASE, layout="grouped", reduce="sender"), 3, None),
    "grouped-aligned-flags": (
        mc.MoeConfig(**BASE, layout="grouped", expert_alignment=4, wire="flags"), 2, None
    ),
    "rank-cast-lines": (mc.MoeConfig(**FP8, layout="rank"), 2, "bfloat16"),
    "capped-cast-flags": (
        mc.MoeConfig(**FP8, layout="grouped", max_recv_tokens=64, wire="flags"), 2, "float32"
    ),
    "replicas-lines": (mc.MoeConfig(**BASE, replicas=2), 2, None),
    "block-a-row-flags": (mc.MoeConfig(**{**BASE, "num_sms": 6}, wire="flags"), 2, None),
    "two-pieces-a-warp-lines": (
        mc.MoeConfig(**{**BASE, "hidden": 1440, "num_sms": 1}, layout="rank", wire="lines"), 2, None
    ),
    "odd-flags": (
        mc.MoeConfig(**{**BASE, "hidden": 37}, dispatch_dtype="float32", combine_dtype="float32"),
        2, None,
    ),
    "grouped-bounce": (mc.MoeConfig(**BASE, layout="grouped"), 3, None),
    "rank-cast-bounce": (mc.MoeConfig(**FP8, layout="rank"), 2, "bfloat16"),
}  # fmt: skip


def network(name: str) -> tuple[str, dict[str, str]]:
    """The transport of a case, and variables of the environment that it needs."""
    if not name.endswith("-bounce"):
        return "auto", {}
    return "efa", {"MOECOMM_NODE_SIZE": "1", "MOECOMM_FABRIC": "tcp", "MOECOMM_BOUNCE": "1"}


def exchange(group: mc.Group, cases: Sequence[Case], where: str, transport: str = "auto") -> None:
    """Every case in turn on one communicator, half by half in step."""

    def there(array: Any) -> Any:
        return None if array is None else tensor(array, where)

    with mc.MoeComm(cases[0].cfg, group, transport) as comm:
        for case in cases:
            me, early = group.rank, case.weights_at_dispatch
            weights = there(case.weights[me])
            scale = None if case.x_scales is None else there(case.x_scales[me])
            given = there(case.xs[me]), there(case.idxs[me]), weights if early else None, scale
            _together(group, where, "a step:")
            handle = comm.dispatch_send(*given)
            _together(group, where, "dispatch_send")
            recv = comm.dispatch_recv(handle)
            _together(group, where, "dispatch_recv")
            compare_received(case, me, _on_host(recv))
            comm.combine_send(there(case.ys[me]), handle)
            _together(group, where, "combine_send")
            out = comm.combine_recv(handle, None if early else weights)
            _together(group, where, "combine_recv")
            comm.check()
            assert_same_bits(to_numpy(out.cpu()), case.outs[me], f"rank {me}: out")


def _on_host(recv: mc.Received) -> mc.Received:
    arrays = {
        field.name: getattr(recv, field.name).cpu()
        for field in dataclasses.fields(recv)
        if field.name != "handle" and getattr(recv, field.name) is not None
    }
    return received_as_numpy(dataclasses.replace(recv, **arrays))


def _together(group: mc.Group, where: str, done: str) -> None:
    """All ranks' kernels have ended; says so, since under a sanitizer that can take minutes."""
    if where != "cpu":
        import torch

        torch.cuda.synchronize()
    group.barrier(TIMEOUT_S)
    if group.rank == 0:
        sys.stdout.write(f"  {done}\n")
        sys.stdout.flush()


def main(names: Sequence[str]) -> None:
    os.environ.setdefault("MOECOMM_NO_EARLY_START", "1")
    for name in names or CASES:
        cfg, ranks, input_dtype = CASES[name]
        cases = [make_case(cfg, ranks, step, input_dtype=input_dtype) for step in range(STEPS)]
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        transport, variables = network(name)
        os.environ.update(variables)
        run_threads(exchange, ranks, cases, "cuda:0", transport, device="cuda")


if __name__ == "__main__":
    main(sys.argv[1:])
