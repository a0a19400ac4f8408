"""The demo's parts: text, router, experts over every layout, traffic, verdict."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moecomm import reference
from moecomm.config import MoeConfig
from moecomm.demo import session
from moecomm.demo.experts import Expert, run_experts
from moecomm.demo.layer import Problem, RankResult, error_bound, run_plain
from moecomm.demo.report import print_report
from moecomm.demo.router import route
from moecomm.demo.session import Options, Result
from moecomm.demo.text import default_text, embed, load_text, token_ids, tokenise
from moecomm.demo.traffic import count_traffic, crossing
from moecomm.errors import CompileError, ConfigError

TEXT = "The router picks experts; the experts answer. Tokens travel to experts, and back! " * 3


def make_problem(num_ranks: int = 3, **changes: object) -> Problem:
    options = Options(hidden=64, inner=32, experts=7, top_k=3, step_tokens=8, ranks=num_ranks)
    options = replace(options, **changes)
    return Problem(
        ids=token_ids(tokenise(TEXT)),
        num_ranks=num_ranks,
        cfg=options.config(),
        inner=options.inner,
        seed=options.seed,
    )


def run_by_reference(problem: Problem, experts: list[list[Expert]]) -> list[RankResult]:
    """The sharded layer with ``moecomm.reference`` between the ranks, step by step."""
    cfg, num_ranks = problem.cfg, problem.num_ranks
    inputs = [problem.inputs(problem.share(rank)) for rank in range(num_ranks)]
    outs: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    received = [np.zeros(len(hosted), np.int64) for hosted in experts]
    for step in range(problem.num_steps):
        rows = slice(step * cfg.max_tokens, (step + 1) * cfg.max_tokens)
        xs = [x[rows] for x, _ in inputs]
        idx = [routing.topk_idx[rows] for _, routing in inputs]
        weights = [routing.topk_weights[rows] for _, routing in inputs]
        recvs = reference.dispatch(cfg, num_ranks, xs, idx, weights)
        ys = [run_experts(recv, hosted, cfg) for recv, hosted in zip(recvs, experts, strict=True)]
        back = reference.combine(cfg, num_ranks, ys, idx, None if cfg.layout == "rank" else weights)
        for rank in range(num_ranks):
            received[rank] += recvs[rank].counts
            outs[rank].append(back[rank])
    return [
        RankResult(np.concatenate(out), counts, *counted(problem, rank))
        for rank, (out, counts) in enumerate(zip(outs, received, strict=True))
    ]


def counted(problem: Problem, rank: int) -> tuple[list[int], list[int], list[int]]:
    """What the kernels' counters would say: copies and bytes by destination."""
    copies = count_traffic(problem, run_plain(problem).routing).per_rank[rank].tolist()
    return copies, [150 * n for n in copies], [300 * n for n in copies]


def hosted_experts(problem: Problem) -> list[list[Expert]]:
    return [
        [
            problem.expert(e)
            for e in reference.expert_range(problem.cfg.num_experts, problem.num_ranks, rank)
        ]
        for rank in range(problem.num_ranks)
    ]


def make_result(problem: Problem, ranks: list[RankResult]) -> Result:
    plain = run_plain(problem)
    return Result(
        source="text",
        options=Options(ranks=problem.num_ranks),
        device="cpu",
        problem=problem,
        ranks=ranks,
        plain=plain,
        traffic=count_traffic(problem, plain.routing),
        out=np.concatenate([rank.out.astype(np.float32) for rank in ranks]),
        plain_s=0.1,
        sharded_s=0.2,
    )


# ---- text ---------------------------------------------------------------------------------------


def test_tokens_are_pieces_digits_and_signs() -> None:
    assert tokenise("Scattering 42: (x)") == [
        *("scatte", "##ring"),
        *("4", "2", ":"),
        *("(", "x", ")"),
    ]


def test_token_ids_repeat_with_their_token_and_do_not_depend_on_the_process() -> None:
    ids = token_ids(["moe", "rank", "moe"])
    assert ids[0] == ids[2] != ids[1]
    assert ids[0] == 701_938  # fixed by the hash: the same on every machine


def test_embedding_has_unit_size_and_knows_its_neighbours() -> None:
    ids = token_ids(["a", "b", "a", "c", "a"])
    rows = embed(ids, 0, 5, 64, seed=1)
    assert np.allclose(np.sqrt(np.mean(rows**2, axis=1)), 1, atol=1e-3)
    assert not np.array_equal(rows[0], rows[2])
    assert np.array_equal(embed(ids, 2, 4, 64, seed=1), rows[2:4])  # a rank's own piece


def test_the_default_text_is_the_readme() -> None:
    name, text = default_text()
    assert "README" in name
    assert text.startswith("# moecomm")


@pytest.mark.parametrize(
    ("contents", "rule"),
    [(None, "No such file"), (b"\xff\xfe\x00", "UTF-8"), (b" \n\t ", "visible character")],
    ids=["missing", "binary", "blank"],
)
def test_a_bad_text_file_is_named(tmp_path: Path, contents: bytes | None, rule: str) -> None:
    path = tmp_path / "text.txt"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match=rule) as caught:
        load_text(path)
    assert "text.txt" in str(caught.value)


# ---- router -------------------------------------------------------------------------------------


def test_routing_is_the_top_of_a_softmax() -> None:
    x = np.random.default_rng(3).standard_normal((40, 32)).astype(np.float32)
    full, few = route(x, 9, 9, seed=1), route(x, 9, 4, seed=1)
    assert np.array_equal(np.sort(full.topk_idx, axis=1), np.tile(np.arange(9), (40, 1)))
    assert (np.diff(full.topk_weights, axis=1) <= 0).all()
    assert np.allclose(full.topk_weights.sum(axis=1), 1)
    assert np.array_equal(few.topk_idx, full.topk_idx[:, :4])
    kept = full.topk_weights[:, :4]
    assert np.allclose(few.topk_weights, kept / kept.sum(axis=1, keepdims=True))


def test_routing_does_not_depend_on_the_batch() -> None:
    x = np.random.default_rng(4).standard_normal((200, 64)).astype(np.float32)
    whole = route(x, 32, 8, seed=1)
    pieces = [route(x[i : i + 1], 32, 8, seed=1) for i in range(200)]
    assert np.array_equal(whole.topk_idx, np.concatenate([p.topk_idx for p in pieces]))


def test_routing_of_no_tokens() -> None:
    routing = route(np.zeros((0, 16), np.float32), 4, 2, seed=1)
    assert routing.topk_idx.shape == routing.topk_weights.shape == (0, 2)


# ---- layer --------------------------------------------------------------------------------------

CASES = {
    "batched": {},
    "grouped": {"layout": "grouped"},
    "rank": {"layout": "rank"},
    "fp32": {"dtype": "float32", "combine_dtype": "float32"},
    "fp8": {"dtype": "float8_e4m3fn", "layout": "grouped"},
    "fp16-sender": {"dtype": "float16", "combine_dtype": "float16", "reduce": "sender"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_ranks", [1, 3, 9])
def test_sharded_layer_equals_plain_layer(num_ranks: int, changes: dict[str, object]) -> None:
    problem = make_problem(num_ranks, **changes)
    result = make_result(problem, run_by_reference(problem, hosted_experts(problem)))
    assert result.faults == []
    assert result.max_output > 0.1
    assert 0 < result.worst_share <= 1


def test_error_bound_is_tight_enough_to_see_a_swapped_expert() -> None:
    problem = make_problem()
    experts = hosted_experts(problem)
    experts[0][0], experts[0][1] = experts[0][1], experts[0][0]
    result = make_result(problem, run_by_reference(problem, experts))
    assert result.worst_share > 5
    assert "times what rounding explains" in result.faults[0]


def test_error_bound_sees_one_wrong_row() -> None:
    problem = make_problem()
    ranks = run_by_reference(problem, hosted_experts(problem))
    ranks[1].out[0] = ranks[1].out[1]
    assert make_result(problem, ranks).worst_share > 5


def test_lost_tokens_and_values_that_are_not_finite_are_faults() -> None:
    problem = make_problem()
    ranks = run_by_reference(problem, hosted_experts(problem))
    ranks[2].received[0] += 1
    ranks[1].copies[0] += 1
    ranks[0].out[0, 0] = np.nan
    not_finite, lost, copied = make_result(problem, ranks).faults
    assert "not finite" in not_finite
    assert "did not receive" in lost
    assert "one copy per (token, rank)" in copied


def test_error_bound_grows_with_the_dtype_of_combine() -> None:
    problem = make_problem()
    plain = run_plain(problem)
    bounds = [
        error_bound(
            plain, MoeConfig(num_experts=7, top_k=3, hidden=64, max_tokens=8, combine_dtype=d)
        )
        for d in ("float32", "float16", "bfloat16")
    ]
    assert (bounds[0] < bounds[1]).all()
    assert (bounds[1] < bounds[2]).all()


# ---- traffic and report -------------------------------------------------------------------------


def test_traffic_counts_distinct_ranks_and_experts() -> None:
    problem = make_problem()
    routing = run_plain(problem).routing
    traffic = count_traffic(problem, routing)
    owner = [0, 0, 0, 1, 1, 2, 2]  # 7 experts on 3 ranks
    per_rank, per_expert = np.zeros((3, 3), int), np.zeros((3, 3), int)
    for token, chosen in enumerate(routing.topk_idx):
        source = next(r for r in range(3) if token in problem.share(r))
        for peer in {owner[e] for e in chosen}:
            per_rank[source, peer] += 1
        for expert in chosen:
            per_expert[source, owner[expert]] += 1
    assert np.array_equal(traffic.per_rank, per_rank)
    assert np.array_equal(traffic.per_expert, per_expert)
    assert crossing(traffic.per_expert) > crossing(traffic.per_rank) > 0
    assert traffic.load.sum() == routing.topk_idx.size


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_report_prints_on_any_terminal(encoding: str) -> None:
    problem = make_problem()
    result = make_result(problem, run_by_reference(problem, hosted_experts(problem)))

    class Screen(StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    screen = Screen()
    print_report(result, Console(file=screen, width=80))
    shown = screen.getvalue()
    assert "PASSED" in shown
    assert "one copy per (token, rank)" in shown
    assert ("█" in shown) == (encoding == "utf-8")
    if encoding == "ascii":
        shown.encode("ascii")


def test_report_says_what_failed() -> None:
    problem = make_problem()
    ranks = run_by_reference(problem, hosted_experts(problem))
    ranks[0].out[:] = 0
    screen = StringIO()
    print_report(make_result(problem, ranks), Console(file=screen, width=120))
    assert "FAILED" in screen.getvalue()
    assert "times what rounding explains" in screen.getvalue()


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "ranks", "chosen"), [(2, 2, "cuda"), (2, 3, "cpu"), (0, 1, "cpu")]
)
def test_auto_takes_gpus_where_every_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, chosen: str
) -> None:
    monkeypatch.setattr(session.Toolchain, "load", lambda: None)
    monkeypatch.setattr(session.cuda_driver, "device_count", lambda: gpus)
    assert session.resolve_device("auto", ranks) == chosen
    assert session.resolve_device("cpu", ranks) == "cpu"


def test_auto_is_the_cpu_where_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompileError("no toolchain")

    monkeypatch.setattr(session.Toolchain, "load", missing)
    monkeypatch.setattr(session.cuda_driver, "device_count", lambda: 8)
    assert session.resolve_device("auto", 1) == "cpu"
