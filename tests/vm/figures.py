"""What ``speed.py`` makes of its times, and how the documentation shows that."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEFT_OUT: Final = 2
SIDES: Final = ("ib_write_lat", "ib_send_lat", "hooks", "engine")


def half_round_trip(posts: NDArray[np.int64], us: float) -> tuple[float, float]:
    """Typical and average microseconds of half a round trip, as perftest tells them.

    Of the times from post to post that is the median, and the mean of all but the ``LEFT_OUT``
    longest. The first is one of those as a rule: it lasts until the other side has begun.

    Args:
        posts: when each post was made, in units of ``us`` microseconds; at least 4.
    """
    trips = np.sort(np.diff(posts))[:-LEFT_OUT]
    return float(np.median(trips)) * us / 2, float(trips.mean()) * us / 2


def result(what: str, unit: str, runs: dict[str, list[float]]) -> dict[str, Any]:
    """A row of results: all runs and, of each side, the best. Runs alternate, and other work on
    the machine only takes away."""
    best = max if unit == "MB/s" else min
    return {
        "kind": "perftest",
        "what": what,
        "unit": unit,
        "best": {side: round(best(values), 2) for side, values in runs.items()},
        "runs": {side: [round(value, 2) for value in values] for side, values in runs.items()},
    }


def table(results: list[dict[str, Any]]) -> str:
    """The latencies as a Markdown table; the last columns are ratios. Without averages, in which
    a single time slice of other work, of 4 ms, is more than all there is to compare."""
    heads = [*SIDES, *(f"engine / {side}" for side in SIDES[:2])]
    rows = [f"| half round trip, 8 B | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row in results:
        best = row["best"]
        if row["what"] != "typical":
            continue
        cells = [f"{best[side]:.1f}" for side in SIDES]
        cells += [f"{best['engine'] / best[side]:.2f}" for side in SIDES[:2]]
        rows.append(f"| {row['what']}, {row['unit']} | {' | '.join(cells)} |")
    return "\n".join(rows)
