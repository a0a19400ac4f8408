"""One exchange on a GPU: a case's arrays as torch tensors, and comparison bit by bit, there."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from exchange import Case, used_rows

import moecomm as mc

RECEIVED = ("x", "x_scale", "src_rank", "src_token", "topk_weights", "topk_idx")


def tensor(array: np.ndarray[Any, Any], device: str) -> Any:
    """A copy on ``device``; bfloat16 and fp8 travel as integers."""
    import torch

    name = array.dtype.name
    words = np.ascontiguousarray(array)
    if name in ("bfloat16", "float8_e4m3fn"):
        words = words.view(np.int16 if name == "bfloat16" else np.uint8)
    return torch.from_numpy(words.copy()).to(device).view(getattr(torch, name))


def bits(found: Any) -> Any:
    """A tensor's elements as integers of their size."""
    import torch

    return found.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()])


class OnGpu:
    """What rank ``rank`` of ``case`` gives and must get, on ``device``."""

    def __init__(self, case: Case, rank: int, device: str) -> None:
        import torch

        def there(array: Any) -> Any:
            return None if array is None else tensor(array, device)

        self.case, self.rank = case, rank
        self.x, self.idx = there(case.xs[rank]), there(case.idxs[rank])
        self.weights = there(case.weights[rank])
        self.scale = there(None if case.x_scales is None else case.x_scales[rank])
        self.y, self.out = there(case.ys[rank]), there(case.outs[rank])
        self.used = torch.from_numpy(np.flatnonzero(used_rows(case, rank))).to(device)
        expected = case.recv[rank]
        self.counts, self.num_rows = there(expected.counts), there(expected.num_rows)
        fields = {name: getattr(expected, name) for name in RECEIVED}
        self.received = {
            name: None if array is None else self._rows(there(array))
            for name, array in fields.items()
        }

    def send(self, comm: mc.MoeComm, **options: Any) -> mc.Handle:
        at_dispatch = self.weights if self.case.weights_at_dispatch else None
        return comm.dispatch_send(self.x, self.idx, at_dispatch, self.scale, **options)

    def combine(self, comm: mc.MoeComm, handle: mc.Handle, **options: Any) -> Any:
        comm.combine_send(self.y, handle, **{k: v for k, v in options.items() if k == "stream"})
        later = None if self.case.weights_at_dispatch else self.weights
        return comm.combine_recv(handle, later, **options)

    def compare_received(self, recv: mc.Received) -> None:
        """Every row that means something; synchronises."""
        import torch

        assert torch.equal(recv.counts, self.counts), f"rank {self.rank}: counts"
        assert torch.equal(recv.num_rows, self.num_rows), f"rank {self.rank}: num_rows"
        for name, want in self.received.items():
            have = getattr(recv, name)
            assert (want is None) == (have is None), f"rank {self.rank}: {name}"
            if want is not None:
                assert torch.equal(self._rows(have), want), f"rank {self.rank}: {name}"

    def compare_out(self, out: Any) -> None:
        import torch

        assert torch.equal(bits(out), bits(self.out)), f"rank {self.rank}: out"

    def run(self, comm: mc.MoeComm, **options: Any) -> None:
        """The whole exchange, compared."""
        recv = comm.dispatch_recv(self.send(comm, **options), **options)
        out = self.combine(comm, recv.handle, **options)
        self.compare_received(recv)
        self.compare_out(out)

    def _rows(self, found: Any) -> Any:
        """The used rows as integers: ``[L, C, ...]`` or ``[N, ...]`` → ``[used, ...]``."""
        outer = 2 if self.case.cfg.layout == "batched" else 1
        return bits(found).flatten(0, outer - 1)[self.used]


def on_device(comm: mc.MoeComm) -> str:
    """The communicator's device, as torch names it; it becomes torch's current one."""
    import torch

    assert comm.device != "cpu"
    torch.cuda.set_device(comm.device[1])
    return f"cuda:{comm.device[1]}"


@functools.cache
def delay(most: int, seed: int) -> Any:
    """A function that queues a kernel of random length (clock cycles up to ``most``)."""
    import torch

    rng = np.random.default_rng(seed)
    return lambda: torch.cuda._sleep(int(rng.integers(0, most)))
