"""The results as text for a terminal, and as a plot."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from moecomm.errors import ConfigError

Result = dict[str, Any]


def _us(key: str) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        value = result.get(key)
        return "-" if value is None else f"{value:.1f}"

    return cell


def _dtype(result: Result) -> str:
    """What travels, and what it is made of where that differs."""
    names = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    wire, given = (names[result[key]] for key in ("dispatch_dtype", "input_dtype"))
    return wire if wire == given else f"{given}>{wire}"


def _host(result: Result) -> str:
    times = result.get("host_us_p50")
    return "-" if not times else f"{max(times.values()):.1f}"


def _ratio(result: Result) -> str:
    bound, pair = result.get("bound_us"), result.get("pair_us_p50")
    return f"{pair / bound:.1f}x" if bound and pair else "-"


COLUMNS: Final[tuple[tuple[str, Callable[[Result], str]], ...]] = (
    ("layout", lambda r: str(r["layout"])),
    ("tokens", lambda r: str(r["num_tokens"])),
    ("dtype", _dtype),
    ("routing", lambda r: str(r["routing"])),
    ("wire", lambda r: str(r["wire"])),
    ("pair p50", _us("pair_us_p50")),
    ("p99", _us("pair_us_p99")),
    ("dispatch", _us("dispatch_us_p50")),
    ("combine", _us("combine_us_p50")),
    ("bound", _us("bound_us")),
    ("ratio", _ratio),
    ("NCCL", _us("nccl_us_p50")),
    ("host", _host),
)
_TEXT_COLUMNS: Final = ("layout", "dtype", "routing", "wire")


def table(results: Iterable[Result]) -> str:
    """A line per result, times in µs; worst rank. What went wrong stands in place of figures."""
    rows = [[title for title, _ in COLUMNS]]
    notes: dict[int, str] = {}
    for number, result in enumerate(results, start=1):
        rows.append([cell(result) for _, cell in COLUMNS])
        if "skipped" in result:
            notes[number] = f"skipped: {result['skipped']}"
        elif not result["correct"]:
            notes[number] = f"WRONG: {'; '.join(result['faults'])}"
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
    lines = []
    for number, row in enumerate(rows):
        shown = [
            cell.ljust(width) if title in _TEXT_COLUMNS else cell.rjust(width)
            for cell, width, (title, _) in zip(row, widths, COLUMNS, strict=True)
        ]
        if number in notes:
            shown[5:] = [notes[number]]
        lines.append("  ".join(shown).rstrip())
    return "\n".join(lines)


def plotting(path: Path) -> Any:
    """What draws the plot at ``path``; asked before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"plot={path}: needs the package matplotlib: pip install 'moecomm[plot]'"
        ) from error


def plot(results: list[Result], path: Path) -> None:
    """Pair time against tokens, a line for each kind of case, with bound and NCCL.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    canvas = plotting(path).Figure(figsize=(8, 5), layout="constrained")
    axes = canvas.subplots()
    kinds: dict[str, list[Result]] = {}
    for result in results:
        if result.get("pair_us_p50") is not None:
            label = f"{result['layout']}, {_dtype(result)}, {result['routing']}"
            kinds.setdefault(label, []).append(result)
    for label, members in kinds.items():
        _line(axes, members, "pair_us_p50", label=label, marker="o")
    for members in list(kinds.values())[:1]:
        _line(axes, members, "bound_us", label="lower bound", linestyle=":", color="black")
        _line(axes, members, "nccl_us_p50", label="NCCL all-to-all", linestyle="--", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="dispatch + combine, µs")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path, dpi=150)


def _line(axes: Any, members: list[Result], key: str, **style: Any) -> None:
    points = [(r["num_tokens"], r[key]) for r in members if r.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)
