"""Orders in which a rank may call the halves of several exchanges.

All ranks open and free handles in one order; in between, each may receive and send back in its
own. ``random_schedule`` makes the common order, ``for_rank`` one rank's variation of it, ``walk``
performs it and compares everything with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from exchange import Case, compare_received
from forked import die
from payload import assert_same_bits
from tensors import received_as_numpy, to_numpy

import moecomm as mc

HALVES = ("send", "recv", "return", "finish")
FREE_ORDER = ("recv", "return", "finish")  # neighbours of one kind may change places

Action = tuple[str, int]  # what to do with the exchange of which number


def random_schedule(
    rng: np.random.Generator, num_steps: int, in_flight: int, *, closed: float = 0.0
) -> list[Action]:
    """Every half of ``num_steps`` exchanges, at most ``in_flight`` of them open at once; a share
    ``closed`` of them is closed at some half instead of being finished."""
    actions: list[Action] = []
    stage: dict[int, int] = {}  # open exchange → next half
    ends = {n: int(rng.integers(1, 4)) for n in range(num_steps) if rng.random() < closed}
    started = 0
    while started < num_steps or stage:
        may_start = started < num_steps and len(stage) < in_flight
        if may_start and (not stage or rng.random() < 0.4):
            actions.append(("send", started))
            stage[started] = 1
            started += 1
            continue
        number = int(rng.choice(list(stage)))
        closing = ends.get(number) == stage[number]
        actions.append(("close" if closing else HALVES[stage[number]], number))
        stage[number] += 1
        if closing or stage[number] == len(HALVES):
            del stage[number]
    return actions


def for_rank(schedule: Sequence[Action], rng: np.random.Generator) -> list[Action]:
    """The same actions; within runs of one kind that need no common order, shuffled."""
    actions: list[Action] = []
    run: list[Action] = []
    for action in [*schedule, ("", -1)]:
        if run and action[0] != run[0][0]:
            if run[0][0] in FREE_ORDER:
                rng.shuffle(run)
            actions += [(str(kind), int(number)) for kind, number in run]
            run = []
        run.append(action)
    return actions


def dispatch_arguments(case: Case, rank: int) -> tuple[Any, ...]:
    """``x, topk_idx, topk_weights, x_scale`` of one rank."""
    weights = case.weights[rank] if case.weights_at_dispatch else None
    scales = None if case.x_scales is None else case.x_scales[rank]
    return case.xs[rank], case.idxs[rank], weights, scales


def step_or_die(comm: mc.MoeComm, case: Case, dead: int, half: str) -> None:
    """One exchange, nothing compared; behind ``half`` rank ``dead`` is killed, "": nobody is."""
    rank = comm.group.rank

    def now(name: str) -> None:
        if rank == dead and name == half:
            die()

    handle = comm.dispatch_send(*dispatch_arguments(case, rank))
    now("dispatch_send")
    comm.dispatch_recv(handle)
    now("dispatch_recv")
    comm.combine_send(case.ys[rank], handle)
    now("combine_send")
    comm.combine_recv(handle, case.weights[rank])


def fail(text: str) -> None:
    raise AssertionError(text)


def walk(
    comm: mc.MoeComm,
    cases: Sequence[Case],
    schedule: Sequence[Action],
    *,
    pause: Callable[[], None] = lambda: None,
    convert: Callable[[Any], Any] = lambda array: array,
    report: Callable[[str], None] = fail,
) -> None:
    """Perform ``schedule``, exchange ``n`` being ``cases[n % len(cases)]``; compare bit for bit.

    ``pause`` comes before every action, ``convert`` makes the arrays that are handed over, and
    ``report`` takes what is wrong: a rank that goes on keeps its peers from waiting for it.
    """
    handles: dict[int, mc.Handle] = {}
    for kind, number in schedule:
        pause()
        case = cases[number % len(cases)]
        try:
            _act(comm, case, kind, number, handles, convert)
        except AssertionError as error:
            report(f"exchange {number}: {error}")
    assert {handle.state.name for handle in handles.values()} <= {"CLOSED"}, handles


def _act(
    comm: mc.MoeComm,
    case: Case,
    kind: str,
    number: int,
    handles: dict[int, mc.Handle],
    convert: Callable[[Any], Any],
) -> None:
    rank = comm.group.rank
    if kind == "send":
        given = dispatch_arguments(case, rank)
        handles[number] = comm.dispatch_send(*(None if a is None else convert(a) for a in given))
    elif kind == "recv":
        recv = comm.dispatch_recv(handles[number])
        compare_received(case, rank, received_as_numpy(recv))
    elif kind == "return":
        comm.combine_send(convert(case.ys[rank]), handles[number])
    elif kind == "close":
        handles[number].close()
    else:
        weights = None if case.weights_at_dispatch else convert(case.weights[rank])
        out = comm.combine_recv(handles[number], weights)
        assert type(out) is type(convert(case.outs[rank]))
        assert_same_bits(to_numpy(out), case.outs[rank], f"rank {rank}: out")
