"""RDMA ports as the kernel shows them in sysfs."""

from __future__ import annotations

from pathlib import Path

LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"  # 10.0.0.1
LOOPBACK = "0000:0000:0000:0000:0000:ffff:7f00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def make_port(
    sysfs: Path,
    device: str,
    entries: dict[int, tuple[str, str]],
    *,
    number: int = 1,
    state: str = "4: ACTIVE",
    link: str = "Ethernet",
) -> Path:
    """A port as the kernel shows it; ``entries``: index → address and type."""
    folder = sysfs / device / "ports" / str(number)
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{link}\n")
    for index in range(max(entries, default=0) + 3):
        raw, kind = entries.get(index, (EMPTY, ""))
        (folder / "gids" / str(index)).write_text(f"{raw}\n")
        if kind:
            (folder / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    return folder
