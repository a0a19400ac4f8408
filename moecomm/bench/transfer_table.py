"""The results of ``moecomm bench-transfer`` as text."""

from __future__ import annotations

from typing import Any


def table(results: list[dict[str, Any]]) -> str:
    """The results as rows of a Markdown table, as the documentation shows them."""
    rows = ["| fabric | what | unit | C | engine | ratio |", "|---|---|---|---|---|---|"]
    for r in results:
        cells = (r["fabric"], r["what"], r["unit"], *(f"{r[key]:.3g}" for key in ("c", "engine")))
        rows.append(f"| {' | '.join(cells)} | {r['ratio']:.2f} |")
    return "\n".join(rows)
