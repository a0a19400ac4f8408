"""The benchmark without a GPU: its oracle against the emulator, its cases, its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from payload import assert_same_bits
from threads import run_threads

import moecomm as mc
from moecomm.bench.environment import environment
from moecomm.bench.inputs import make_inputs, routing
from moecomm.bench.link import Link, busiest_rows, rows_to_ranks
from moecomm.bench.options import FP8, Case, Options
from moecomm.bench.oracle import Oracle, differs
from moecomm.bench.session import results_of
from moecomm.bench.table import plot, table
from moecomm.bench.timing import HostClock, percentile
from moecomm.bench.worker import Exchange, check_exchange
from moecomm.cli import bench as command
from moecomm.dtypes import numpy_dtype

SMALL: dict[str, Any] = {"num_experts": 11, "top_k": 3, "hidden": 40, "scale_block": 16}
CHOICES = {
    "batched": {"layouts": ("batched",)},
    "grouped": {"layouts": ("grouped",), "expert_alignment": 4},
    "rank": {"layouts": ("rank",)},
    "sender": {"layouts": ("batched",), "reduce": "sender"},
    "cast": {"layouts": ("grouped",), "dispatch_dtypes": (FP8,), "input_dtypes": ("float32",)},
    "quantised": {"layouts": ("rank",), "dispatch_dtypes": (FP8,), "input_dtypes": (FP8,)},
}


def options(**changes: Any) -> Options:
    plain = {"dispatch_dtypes": ("bfloat16",), "tokens": (7,), "ranks": 3}
    return Options(**{**SMALL, **plain, **changes})


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("which", ["uniform", "zipf"])
def test_the_oracle_agrees_with_the_kernels(name: str, which: str) -> None:
    chosen = options(**CHOICES[name], routings=(which,))
    (case,) = chosen.cases()
    for faults in run_threads(_exchange, 3, chosen, case):
        assert faults == []


@pytest.mark.parametrize("name", ["cast", "rank"])
def test_the_oracle_agrees_with_the_kernels_in_python(name: str) -> None:
    """The exchange that is measured has their wire."""
    chosen = options(**CHOICES[name], kernels="numba")
    (case,) = chosen.cases()
    assert chosen.config(case).wire == "flags"
    for faults in run_threads(_exchange, 3, chosen, case):
        assert faults == []


def _exchange(group: mc.Group, chosen: Options, case: Case) -> list[str]:
    cfg = chosen.config(case)
    given = make_inputs(cfg, case, group.size, chosen.seed, "cpu")
    with mc.MoeComm(cfg, group, device="cpu", kernels=chosen.kernels) as comm:
        exchange = Exchange(comm, given)
        faults = check_exchange(exchange, given)
        exchange.pair()  # what is timed gives the same
        oracle = Oracle(comm.layout, given)
        if differs(exchange.out, oracle.output()):
            faults.append("the timed pair gives something else")
        faults += _unnoticed(comm, oracle, exchange)
        group.barrier(20)
    return faults


def _unnoticed(comm: mc.MoeComm, oracle: Oracle, exchange: Exchange) -> list[str]:
    """Fields that may be wrong without the oracle's noticing."""
    recv = comm.dispatch_recv(exchange.dispatch_send())
    names = ["counts", "num_rows", "x", "src_rank", "src_token"]
    names += [n for n in ("x_scale", "topk_idx") if getattr(recv, n) is not None]
    for name in names:
        array = getattr(recv, name)
        whole = array.view(torch.uint8) if array.dtype == torch.float8_e4m3fn else array
        whole += 1
    seen = {text.split(": ")[1].split()[0] for text in oracle.faults(recv)}
    recv.handle.close()
    return [f"{name} is not looked at" for name in names if name not in seen]


def test_the_oracle_agrees_with_the_reference() -> None:
    chosen = options(layouts=("batched", "grouped", "rank"), expert_alignment=4)
    for case in chosen.cases():
        cfg = chosen.config(case)
        given = make_inputs(cfg, case, 3, 5, "cpu")
        xs, idxs, weights = (
            [_numpy(t[r]) for r in range(3)] for t in (given.x, given.idx, given.weights)
        )
        travel = cfg.layout == "rank"
        recv = mc.reference.dispatch(cfg, 3, xs, idxs, weights if travel else None, None)
        layouts = [mc.Layout(cfg, 3, rank) for rank in range(3)]
        oracles = [Oracle(layout, given) for layout in layouts]
        ys = []
        for oracle, one in zip(oracles, recv, strict=True):
            shown = _as_torch(one)
            assert oracle.faults(shown) == []
            ys.append(_numpy(oracle.expert_outputs(shown)))
        outs = mc.reference.combine(cfg, 3, ys, idxs, None if travel else weights)
        for oracle, out in zip(oracles, outs, strict=True):
            assert_same_bits(_numpy(oracle.output()), out, case.layout)


def _numpy(array: torch.Tensor) -> np.ndarray[Any, Any]:
    if array.dtype == torch.bfloat16:
        return array.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return array.contiguous().numpy()


def _as_torch(one: Any) -> Any:
    def tensor(array: Any) -> Any:
        if array is None:
            return None
        name = array.dtype.name
        words = torch.from_numpy(array.view(np.int16) if name == "bfloat16" else array)
        return words.view(torch.bfloat16) if name == "bfloat16" else words

    names = (
        "x", "x_scale", "counts", "offsets", "num_rows", "src_rank", "src_token",
        "topk_weights", "topk_idx",
    )  # fmt: skip
    return mc.Received(handle=None, **{n: tensor(getattr(one, n)) for n in names})


def test_routing_is_distinct_and_skewed() -> None:
    cfg = mc.MoeConfig(num_experts=64, top_k=8, hidden=16, max_tokens=1000)
    for name, most in (("uniform", 1.5), ("zipf", 4.0)):
        idx = routing(torch, cfg, name, 1000, 3)
        assert idx.shape == (1000, 8)
        assert all(len(set(row)) == 8 for row in idx.tolist())
        counts = np.bincount(idx.flatten(), minlength=64)
        assert (counts.max() / counts.mean() < 1.5) == (most == 1.5)
        assert torch.equal(idx, routing(torch, cfg, name, 1000, 3))
        assert not torch.equal(idx, routing(torch, cfg, name, 1000, 4))


# ---- figures ---------------------------------------------------------------------------------


def report(**figures: Any) -> dict[str, Any]:
    return {"link": {}, "uuids": ["a", "b"], "records": [figures]}


def test_results_are_the_worst_ranks() -> None:
    chosen = options(ranks=2, layouts=("rank",))
    fast = report(pair_us_p50=8.0, pair_us_p99=30.0, host_us_p50={"send": 5.0, "recv": 9.0})
    slow = report(pair_us_p50=9.0, pair_us_p99=20.0, host_us_p50={"send": 7.0, "recv": 4.0})
    (found,) = results_of([fast, slow], chosen)
    assert (found["pair_us_p50"], found["pair_us_p99"]) == (9.0, 30.0)
    assert found["host_us_p50"] == {"send": 7.0, "recv": 9.0}
    assert found["correct"] is True
    expected = {
        "transport": "nvlink", "kernels": "cuda", "layout": "rank", "num_tokens": 7,
        "dispatch_dtype": "bfloat16", "routing": "uniform", "world_size": 2, "num_gpus": 2,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_wrong_results_and_skipped_cases_stand_in_the_table() -> None:
    chosen = options(ranks=2, layouts=("rank",))
    (wrong,) = results_of([report(faults=[]), report(faults=["rank 1: x differs"])], chosen)
    assert wrong["correct"] is False
    (skipped,) = results_of([report(skipped="needs 999 GiB")] * 2, chosen)
    assert skipped["correct"] is None
    figures = {"pair_us_p50": 8.04, "pair_us_p99": 11.0, "bound_us": 4.0}
    (right,) = results_of([report(**figures)] * 2, chosen)
    lines = table([wrong, skipped, right]).splitlines()
    assert "WRONG: rank 1: x differs" in lines[1]
    assert "skipped: needs 999 GiB" in lines[2]
    assert lines[3].split()[:7] == ["rank", "7", "bf16", "uniform", "lines", "8.0", "11.0"]
    assert "2.0x" in lines[3]
    assert len(lines) == 4


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (
        50,
        99,
        100,
    )
    assert percentile([3.0], 50) == percentile([3.0], 1) == 3.0


def test_bytes_between_gpus_are_counted_once_and_in_the_worse_direction() -> None:
    layout = mc.Layout(mc.MoeConfig(num_experts=4, top_k=2, hidden=8, max_tokens=2), 4, 0)
    # Ranks 0 and 1 share a GPU; expert e is rank e's.
    idx = torch.tensor([[[0, 1], [2, 3]], [[2, 0], [2, 1]], [[3, 2], [3, 2]], [[0, 1], [3, 2]]])
    rows = rows_to_ranks(layout, idx)
    assert rows.tolist() == [[1, 1, 1, 1], [1, 1, 2, 0], [0, 0, 2, 2], [1, 1, 1, 1]]
    assert busiest_rows(rows, ["a", "a", "b", "b"]) == 4  # sent; 2 come back
    assert busiest_rows(rows, ["a"] * 4) == 0
    link = Link(bytes_per_s=4e11, flag_us=1.25, launch_us=0.75)
    assert link.bound_us(400_000, 800_000) == pytest.approx(3.0 + 2.5 + 3.0)
    assert Link(None, None, 0.8).bound_us(1, 1) is None


def test_the_host_clock_keeps_what_passed_between_start_and_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter((1.0, 1.25, 7.0, 7.5))
    monkeypatch.setattr("moecomm.bench.timing.time.perf_counter", lambda: next(times))
    clock = HostClock()
    for _ in range(2):
        clock.start()
        clock.stop("nap")
    assert clock.us == {"nap": [250_000.0, 500_000.0]}


def test_the_environment_is_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = json.loads(json.dumps(environment()))
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["variables"]["NCCL_NVLS_ENABLE"] == "0"
    assert found["commit"] is None or len(found["commit"]) == 40


def test_the_environment_names_no_folder_of_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MOECOMM_NICS", "2")
    words = ["bench", "--tokens", "1,8", "--json", f"{tmp_path}/a.json", f"--plot={tmp_path}/a.png"]
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/moecomm", *words])
    found = environment()
    assert found["command"] == "moecomm bench --tokens 1,8 --json a.json --plot=a.png"
    assert found["variables"]["MOECOMM_NICS"] == "2"
    assert str(tmp_path) not in json.dumps(found)


def test_a_plot_needs_matplotlib(tmp_path: Path) -> None:
    figures = {"pair_us_p50": 8.0, "bound_us": 4.0, "nccl_us_p50": 40.0}
    found = list(results_of([report(**figures)] * 2, options(ranks=2, layouts=("rank",))))
    target = tmp_path / "pairs.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(mc.ConfigError, match=r"matplotlib: pip install 'moecomm\[plot\]'"):
            plot(found, target)
    else:
        plot(found, target)
        assert target.stat().st_size > 1000


# ---- choices -----------------------------------------------------------------------------------


def test_cases_are_all_combinations() -> None:
    chosen = options(
        layouts=("batched", "rank"),
        dispatch_dtypes=(FP8, "bfloat16"),
        input_dtypes=(FP8, "bfloat16"),
        tokens=(8, 1),
    )
    cases = list(chosen.cases())
    assert len(cases) == 2 * 2 * 3
    assert [c.num_tokens for c in cases[:2]] == [1, 1]
    assert {c.input_dtype for c in cases if c.dispatch_dtype == "bfloat16"} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ("ring",)}, "layouts: 'ring' must be one of"),
        ({"routings": ("hot",)}, "routings: 'hot' must be one of"),
        ({"tokens": ()}, "tokens=\\(\\): must be at least one"),
        ({"tokens": (0,)}, "tokens=0: must be at least 1"),
        ({"top_k": 12}, "top_k=12"),
        ({"ranks": 0}, "ranks=0: must be at least one"),
    ],
)
def test_bad_choices_are_refused_before_anything_starts(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(mc.ConfigError, match=message):
        options(**changes)


def test_lists_on_the_command_line() -> None:
    assert command._parts("1, 8,,64") == ("1", "8", "64")
    with pytest.raises(mc.ConfigError, match="tokens: '8x' must be a whole number"):
        command._number("tokens", "8x")
