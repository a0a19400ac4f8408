"""docs/performance.md shows nothing that the results do not hold."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from vm import figures

from moecomm.bench.transfer_table import table

ROOT = Path(__file__).parent.parent


QUIET_RUN = 15
DISPATCH = {
    ("float8_e4m3fn", "float8_e4m3fn"): "fp8",
    ("float8_e4m3fn", "bfloat16"): "fp8, cast",
    ("bfloat16", "bfloat16"): "bf16",
}


def _shown(r: dict[str, Any]) -> tuple[str, ...]:
    ratio = r["pair_us_p50"] / r["bound_us"]
    times = (r["pair_us_p50"], r["pair_us_p99"], r["bound_us"], ratio)
    nccl = "–" if r["nccl_us_p50"] is None else f"{r['nccl_us_p50']:.0f}"
    dispatch = DISPATCH[r["dispatch_dtype"], r["input_dtype"]]
    what = (r["layout"], str(r["num_tokens"]), dispatch, r["routing"], r["wire"])
    means = (r["transport"], r["kernels"])
    return (*what, *means, *(f"{time:.1f}" for time in times), nccl)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_results_name_no_folder_of_whoever_measured(path: Path) -> None:
    found = re.findall(r"(?:/(?:tmp|home|root|mnt)/|~/)[^\s\"]*", path.read_text())
    assert not found


def test_the_page_shows_every_result_and_nothing_else() -> None:
    results = [
        result
        for path in (ROOT / "bench" / "results").glob("*.json")
        for result in json.loads(path.read_text())["results"]
        if "kind" not in result
    ]
    assert all(result["correct"] for result in results)
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line.startswith(("| rank", "| batched", "| grouped"))
    ]
    assert sorted(rows) == sorted(map(_shown, results))


def test_the_page_shows_the_transfer_engine_as_measured() -> None:
    found = [
        json.loads(path.read_text())["results"]
        for path in sorted((ROOT / "bench" / "results").glob("*-transfer-*.json"))
    ]
    assert found
    text = (ROOT / "docs" / "performance.md").read_text()
    for results in found:
        assert all(result["kind"] == "transfer" and result["correct"] for result in results)
        assert table(results) in text


def test_the_page_shows_movers_as_measured() -> None:
    """One of the quiet runs as a table; of all, how far apart they are over tcp."""
    (path,) = (ROOT / "bench" / "results").glob("*-bulk-runs.json")
    results = json.loads(path.read_text())["results"]
    assert all(result["kind"] == "bulk" and result["correct"] for result in results)
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    shown = [result for result in results if result["run"] == QUIET_RUN]
    assert " ".join(table(shown).split()) in text
    for nice in (0, -10, -15):
        for half in ("dispatch", "combine"):
            found = [
                r["share"]
                for r in results
                if (r["nice"], r["fabric"], r["what"]) == (nice, "tcp", f"bulk {half}")
            ]
            assert min(found) >= 0.7
            assert f"{min(found):.2f} to {max(found):.2f}" in text


def test_the_page_shows_the_exchange_between_nodes_as_measured() -> None:
    found = [
        result
        for path in (ROOT / "bench" / "results").glob("*-network.json")
        for result in json.loads(path.read_text())["results"]
    ]
    expected = set()
    for result in found:
        assert (result["kind"], result["faults"]) == ("network", [])
        for half in ("dispatch", "combine"):
            one = [result["halves_us"][f"{half}_{part}"] for part in ("send", "recv")]
            times = [*one, result["kernels_us"][half], result["alone_us"][half]]
            expected.add((str(result["tokens"]), half, *(f"{time:.0f}" for time in times)))
    shown = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in (ROOT / "docs" / "performance.md").read_text().splitlines()
        if re.match(r"\| \d+ \| (dispatch|combine) ", line)
    }
    assert shown == expected


def test_the_page_shows_the_engine_beside_perftest_as_measured() -> None:
    found = [
        json.loads(path.read_text())["results"]
        for path in sorted((ROOT / "bench" / "results").glob("*-perftest.json"))
    ]
    assert found
    text = (ROOT / "docs" / "performance.md").read_text()
    for results in found:
        assert all(result["kind"] == "perftest" for result in results)
        assert figures.table(results) in text
        assert _medians(results[0]["runs"]) in " ".join(text.split())


def _medians(runs: dict[str, list[float]]) -> str:
    """What is said of all runs, beside the best ones."""
    theirs, ours = runs["ib_write_lat"], runs["engine"]
    one, other = statistics.median(theirs), statistics.median(ours)
    by_run = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
    return (
        f"are {one:.1f} and {other:.1f} µs, {other / one:.2f} times; "
        f"run by run the median is {by_run:.2f}."
    )


def test_the_picture_is_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    draw = importlib.import_module("drawing").svg
    (path,) = (ROOT / "bench" / "results").glob("*-overlap.json")
    assert (ROOT / "docs" / "overlap.svg").read_text() == draw(json.loads(path.read_text()))
