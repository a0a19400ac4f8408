"""docs/performance.md shows nothing that the results do not hold."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _measured() -> set[tuple[str, ...]]:
    rows = set()
    for path in (ROOT / "bench" / "results").glob("*.json"):
        for r in json.loads(path.read_text())["results"]:
            assert r["correct"], f"{path.name} times a wrong result"
            numbers = (r["pair_us_p50"], r["pair_us_p99"], r["bound_us"])
            ratio = r["pair_us_p50"] / r["bound_us"]
            shown = (*(f"{number:.1f}" for number in (*numbers, ratio)), f"{r['nccl_us_p50']:.0f}")
            rows.add((r["layout"], str(r["num_tokens"]), r["wire"], *shown))
    return rows


def test_every_row_of_the_page_was_measured() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    cells = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if line.startswith(("| rank", "| batched", "| grouped"))
    ]
    assert len(cells) == 9
    measured = _measured()
    for layout, tokens, _, wire, *numbers in cells:
        assert (layout, tokens, wire, *numbers) in measured
