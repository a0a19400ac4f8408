"""Which writes there are between nodes: exactly those that docs/protocol.md says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case
from fake_nic import POSTS
from fake_transport import network
from schedules import Action, for_rank, random_schedule, walk
from threads import run_threads

import moecomm as mc
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.transport.engine import state as S

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=24, max_tokens=6, layout="grouped", wire="flags", timeout_s=20.0
)


def _counted(group: mc.Group, cases: list[Case], schedule: list[Action]) -> tuple[Any, int]:
    """The mover's counters, and how many writes its engine has made for itself."""
    with mc.MoeComm(cases[0].cfg, group, "fake") as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        mover = comm._runtime._mover
        group.barrier(60)
        mover.close()  # everything has gone; what is counted is final
        return mover.counters(), mover._engine._memory.word(S.CREDIT_WRITES)


def _expected(case: Case, me: int, peers: list[int], remote: Remote) -> dict[str, list[int]]:
    """Writes and bytes of one exchange, from the routing alone."""
    cfg = case.cfg
    layout = Layout(cfg, case.num_ranks, me, remote)
    areas = layout.areas
    assert areas is not None
    found = {kind: [0, 0] for kind in ("head", "private", "records", "rows")}

    def add(kind: str, nbytes: int) -> None:
        found[kind][0] += 1
        found[kind][1] += nbytes

    for peer in peers:
        hosted = set(layout.expert_range(peer))
        wanted = [hosted & set(row.tolist()) for row in case.idxs[me]]
        share = [bool(w) for t, w in enumerate(wanted) if t % cfg.replicas == me % cfg.replicas]
        records = sum(share)
        add("head", areas.head_bytes)
        if records:
            add("private", min(records, remote.private_records) * areas.record_bytes)
        if records > remote.private_records:
            add("records", (records - remote.private_records) * areas.record_bytes)
        mine = set(layout.expert_range(me))
        owed = [len(mine & set(row.tolist())) for row in case.idxs[peer]]
        rows = sum(map(bool, owed)) if layout.rows_per_rank else sum(owed)
        add("rows", rows * areas.row_bytes)
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"reduce": "sender"}, {"layout": "rank"}, {"replicas": 2}],
    ids=["grouped", "sender", "rank", "replicas"],
)
@pytest.mark.parametrize(("node_size", "num_nics"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("bounce", [False, True], ids=["straight", "bounce"])
def test_writes_are_those_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch,
    bounce: bool,
    node_size: int,
    num_nics: int,
    changes: dict[str, Any],
) -> None:
    """One head and one row write to every remote peer, one private write and one of the rest where
    there are records; nothing else, and not a byte more. So the interfaces have counted, too."""
    remote = Remote(mode="proxied", private_records=2, bounce=bounce)
    monkeypatch.setattr("moecomm.runtime.proxied.Remote", lambda **_: remote)
    cfg = dataclasses.replace(SMALL, **changes)
    cases = [make_case(cfg, 4, step, skew=0.3 * step) for step in range(4)]
    cases.append(make_case(cfg, 4, 9, tokens=[0, 6, 0, 3][: 4 // cfg.replicas]))
    schedule = random_schedule(np.random.default_rng(1), len(cases), cfg.in_flight)
    with network(4, node_size, num_nics) as net:
        results = run_threads(_counted, 4, cases, schedule)
        net.check_promises()
    for me, (counted, credit_writes) in enumerate(results):
        peers = [p for p in range(4) if p // node_size != me // node_size]
        wanted = [_expected(case, me, peers, remote) for case in cases]
        for kind in ("head", "private", "records", "rows"):
            total = [sum(w[kind][n] for w in wanted) for n in (0, 1)]
            assert list(counted[kind][:2]) == total, (me, kind)
        assert counted["ack"][0] == counted["abort"][0] == 0
        assert counted["leave"][0] <= len(peers)  # not to those that have left
        told = sum(writes for writes, _, _ in counted.values()) + credit_writes
        posts = [net.get(me, POSTS, nic) for nic in range(num_nics)]
        assert sum(posts) == told + len(peers), me  # each has been met once
        assert min(posts) > sum(posts) / num_nics / 2, "all interfaces have their share"
