"""The same bytes by NCCL: two ``all_to_all_single`` in place of a pair."""

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


def pair_us(distributed: Any, group: Group, rows: Any, dispatch: int, combine: int) -> float:
    """Median microseconds of dispatch's and combine's exchange.

    ``rows [R, R]``: rows that go from each rank to each. ``dispatch``, ``combine``: bytes of one.
    """
    torch = importlib.import_module("torch")
    sent, came = rows[group.rank].tolist(), rows[:, group.rank].tolist()
    exchanges = []
    for counts, back, width in ((sent, came, dispatch), (came, sent, combine)):
        given, out = ([count * width for count in way] for way in (counts, back))
        buffers = [torch.zeros(sum(n), dtype=torch.uint8, device="cuda") for n in (out, given)]
        exchanges.append((*buffers, out, given))

    def chain() -> None:
        for _ in range(CHAIN):
            for exchange in exchanges:
                distributed.all_to_all_single(*exchange)

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
