"""Steps of dispatch and combine that give each fault of the mutation tests its chance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from codec_examples import Int8PerToken
from exchange import Case, compare_received, finish, make_case, send

import moecomm as mc
from moecomm import layout
from moecomm.emulator import simulate

# One slot: every step reuses the memory of the one before. A row is more chunks than a warp has
# lanes, a block gets more than one token, and there is little else.
CFG = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=592, max_tokens=15, layout="grouped", in_flight=1, timeout_s=1.0
)
STEPS = 3
SETTINGS = ["busy", "blocks", "divided", "sender", "sparse", "replicas", "uncombined", "codec"]


def cases(wire: Any, setting: str) -> list[Case]:
    """The steps of a setting."""
    cfg = dataclasses.replace(CFG, wire=wire)
    if setting == "sender":
        cfg = dataclasses.replace(cfg, reduce="sender")
    if setting == "codec":  # a row's scale is sent long after its beginning
        cfg = dataclasses.replace(cfg, hidden=2000, codec=Int8PerToken, decode_to="bfloat16")
        return [make_case(cfg, 2, step, tokens=[3, 2], input_dtype="float32") for step in range(2)]
    if setting == "blocks":  # so few records that a block moves each
        cfg = dataclasses.replace(cfg, max_tokens=5)
        return [make_case(cfg, 3, step, tokens=[5, 2, 3]) for step in range(STEPS)]
    if setting == "replicas":  # of each pair, one replica has nothing to send
        cfg = dataclasses.replace(cfg, replicas=2)
        return [make_case(cfg, 4, step, tokens=[1, 1]) for step in range(STEPS)]
    return sparse_cases(cfg) if setting == "sparse" else busy_cases(cfg)


def busy_cases(cfg: mc.MoeConfig) -> list[Case]:
    return [make_case(cfg, 3, step, tokens=[15, 4, 6]) for step in range(STEPS)]


def sparse_cases(cfg: mc.MoeConfig) -> list[Case]:
    """Rank 2 sends nothing and runs ahead as far as it may."""
    idxs = [np.full((4, 3), 0), np.full((6, 3), 6), np.empty((0, 3))]
    idxs = [idx.astype(np.int32) for idx in idxs]
    return [make_case(cfg, 3, step, idxs=idxs) for step in range(STEPS)]


def simulate_setting(steps: list[Case], setting: str, seed: int) -> None:
    """Simulate the steps, with all checks on."""
    combine = setting != "uncombined"
    with pytest.MonkeyPatch.context() as patch:
        if setting == "divided":  # as batches of more than 512 tokens are
            patch.setattr(layout, "UNDIVIDED_TOKENS", 4)
            patch.setattr(layout, "LEAST_CHUNK", 4)
        simulate(run_steps, steps[0].num_ranks, steps, combine, seed=seed, checks="strict")


def run_steps(group: mc.Group, steps: list[Case], combine: bool = True) -> None:
    """One rank's part, everything compared."""
    with mc.MoeComm(steps[0].cfg, group) as comm:
        for case in steps:
            recv = comm.dispatch_recv(send(comm, case))
            compare_received(case, group.rank, recv)
            if combine:
                finish(comm, case, recv)
            else:
                recv.handle.close()
