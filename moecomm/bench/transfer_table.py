"""The results of ``moecomm bench-transfer`` as text."""

from __future__ import annotations

from typing import Any


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown tables, as the documentation shows them: of the engine, of movers."""
    parts = {"transfer": _engine, "bulk": _bulk}
    chosen = {kind: [r for r in results if r["kind"] == kind] for kind in parts}
    return "\n\n".join(part(chosen[kind]) for kind, part in parts.items() if chosen[kind])


def _engine(results: list[dict[str, Any]]) -> str:
    rows = ["| fabric | what | unit | C | engine | ratio |", "|---|---|---|---|---|---|"]
    for r in results:
        cells = (r["fabric"], r["what"], r["unit"], *(f"{r[key]:.3g}" for key in ("c", "engine")))
        rows.append(f"| {' | '.join(cells)} | {r['ratio']:.2f} |")
    return "\n".join(rows)


def _bulk(results: list[dict[str, Any]]) -> str:
    """Bandwidths count all ranks' bytes, but that of one pair."""
    rows = [
        "| fabric | what | MB | C, ms | mover, ms | of C's speed | GB/s | one pair alone, GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        speed = r["bytes"] / r["mover"] / 1e6
        numbers = (f"{r['bytes'] / 1e6:.1f}", *(f"{r[key]:.2f}" for key in ("c", "mover", "share")))
        cells = (r["fabric"], r["what"], *numbers, f"{speed:.1f}", f"{r['pair_gb_s']:.1f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
