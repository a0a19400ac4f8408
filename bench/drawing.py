"""A trace as a picture: a row a lane, a bar a span."""

from __future__ import annotations

from html import escape
from typing import Any

LABELS, WIDTH, ROW, MARGIN = 150, 760, 24, 30  # pixels
NARROW = 7.0  # of one letter
COLOURS = {"products": "#9aa5b1", "network": "#e8a33d", "push": "#4c8bf5", "pull": "#4c8bf5"}
OTHER = "#2f855a"


def svg(trace: dict[str, Any]) -> str:
    """``trace``: of bench/overlap.py."""
    events = trace["traceEvents"]
    lanes = list(dict.fromkeys((e["pid"], e["tid"]) for e in events))
    last = max(e["ts"] + e["dur"] for e in events)
    scale = WIDTH / last
    height = ROW * len(lanes) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + WIDTH + MARGIN}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    for tick in range(0, int(last) + 1, 100):
        x = LABELS + tick * scale
        parts += [_line(x, MARGIN, height - MARGIN), _text(x, height - 10, f"{tick} µs", "middle")]
    for number, (rank, lane) in enumerate(lanes):
        top = MARGIN + number * ROW
        parts.append(_text(4, top + 16, f"{rank}, {lane}"))
        for event in events:
            if (event["pid"], event["tid"]) == (rank, lane):
                parts += _bar(event, top, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(event: dict[str, Any], top: float, scale: float) -> list[str]:
    x, width = LABELS + event["ts"] * scale, max(event["dur"] * scale, 1.0)
    keys = (event["name"], event["tid"], event["name"].partition("_")[2])
    colour = next((COLOURS[key] for key in keys if key in COLOURS), OTHER)
    label = f"{event['name']}: {event['ts']:g} + {event['dur']:g} µs"
    bar = (
        f'<rect x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}">'
        f"<title>{escape(label)}</title></rect>"
    )
    inside = width > NARROW * len(event["name"])
    return [bar, *([_text(x + 4, top + 16, event["name"])] if inside else [])]


def _line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
