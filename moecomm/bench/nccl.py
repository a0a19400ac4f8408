"""The same bytes by NCCL: two ``all_to_all_single``, evenly split, in place of a pair."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from moecomm.bench.timing import percentile
from moecomm.group import Group

CHAIN: Final = 10
SAMPLES: Final = 20


@contextmanager
def process_group(group: Group, index: int) -> Iterator[Any]:
    """A NCCL process group of all ranks; each must have a GPU of its own."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    store = None
    if group.rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, group.size, True, wait_for_workers=False)
    port = int(group.all_gather(str(store.port if store else 0).encode())[0])
    if store is None:
        store = distributed.TCPStore("127.0.0.1", port, group.size, False)
    distributed.init_process_group(
        "nccl",
        store=store,
        rank=group.rank,
        world_size=group.size,
        device_id=torch.device(f"cuda:{index}"),
    )
    try:
        yield distributed
    finally:
        distributed.destroy_process_group()


def pair_us(distributed: Any, group: Group, dispatch_bytes: int, combine_bytes: int) -> float:
    """Median microseconds of dispatch's and combine's exchange. Bytes are per pair of ranks."""
    torch = importlib.import_module("torch")
    buffers = [
        [torch.zeros(group.size * max(1, n), dtype=torch.uint8, device="cuda") for _ in range(2)]
        for n in (dispatch_bytes, combine_bytes)
    ]

    def chain() -> None:
        for _ in range(CHAIN):
            for out, given in buffers:
                distributed.all_to_all_single(out, given)

    chain()
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        chain()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / CHAIN)
    return percentile(samples, 50)
