"""The GPU benchmark without a GPU: its cases run on the CPU at tiny sizes, time is injected, the command says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.kernels import roofline
from bench.kernels.bench_gpu import GOALS, STEPS, Goal, Result, graph_gain, line, row, run, share, to_best_other
from bench.kernels.gpu_cases import FULL, OURS, Case, Sizes, cases
from bench.kernels.gpu_step import EAGER, flat_batch, step_cases
from bench.kernels.measure import Spread, measure, spread
from bench.kernels.model_shapes import LLAMA_3_8B, ModelShape
from bench.kernels.roofline import BFLOAT16, H200, Step
from engine.decode_graphs import EagerGraph

CPU = torch.device("cpu")
TINY = ModelShape(
    name="tiny", layers=2, hidden=64, inner=96, query_heads=4, kv_heads=2, head_dim=16, vocab=80, tied=True
)
SIZES = Sizes(
    decodes=(Step(sequences=3, new=1, context=40),),
    prefills=(Step(sequences=1, new=20, context=20), Step(sequences=2, new=5, context=33)),
    rows=(3,),
    few_rows=(2,),
    sampled=2,
    copied_blocks=2,
)
WORK = roofline.linear("qkv", 1, 4096, 4096, 2)


def fake_timer(seconds: dict[str, float], order: list[str]) -> Callable[[Callable[[], object]], float]:
    """Runs the work, which must return its name, and tells the time that the name has."""

    def timed(work: Callable[[], object]) -> float:
        name = str(work())
        order.append(name)
        return seconds[name]

    return timed


def named(*names: str) -> dict[str, Callable[[], object]]:
    return {name: lambda name=name: name for name in names}  # type: ignore[misc]  # bound at once


def result(**seconds: float) -> Result:
    spreads = {name: Spread(median=s, low=s, high=s) for name, s in seconds.items()}
    return Result(name="case", floor_s=1.0, expected_s=1.2, bound="memory", spreads=spreads)


def test_spreads() -> None:
    assert spread([3.0]) == Spread(median=3.0, low=3.0, high=3.0)
    assert spread([float(i) for i in range(11)]) == Spread(median=5.0, low=1.0, high=9.0)
    with pytest.raises(ValueError, match="at least one round"):
        spread([])


def test_implementations_run_in_turn_after_one_untimed_run_each() -> None:
    order: list[str] = []
    spreads = measure(named("ours", "torch"), fake_timer({"ours": 1.0, "torch": 2.0}, order), rounds=2)
    assert order == ["ours", "torch", "ours", "torch"]
    assert spreads["torch"].median == 2.0


def test_cases_that_would_start_too_late_are_left_out() -> None:
    made = (Case(name=str(i), works=(WORK,), implementations=named(OURS)) for i in range(5))
    answers = iter([True, True, False])
    results = list(run(made, fake_timer({OURS: 1e-3}, []), 1, lambda: next(answers)))
    assert [each.name for each in results] == ["0", "1"]
    assert results[0].floor_s == WORK.floor_s(H200)
    assert results[0].share == pytest.approx(WORK.floor_s(H200) / 1e-3)


def test_shares_and_ratios() -> None:
    assert share(result(ours=2.0)) == 0.5
    assert to_best_other(result(ours=2.0)) is None
    assert to_best_other(result(ours=2.0, sdpa=8.0, flash_attn=3.0)) == 1.5
    assert graph_gain(result(**{OURS: 2.0, EAGER: 5.0})) == 2.5
    assert line(result(ours=2.0, sdpa=3.0)) == (
        "case: 2000000.0 us (2000000.0 to 2000000.0), 50% of the memory roofline, sdpa 3000000.0"
    )


def test_bars() -> None:
    goal = Goal("speed", "case", share, 0.7)
    assert goal.bar({"case": result(ours=1.25)}, None).line() == "BAR speed 0.800 >= 0.70 PASS"
    assert goal.bar({"case": result(ours=2.0)}, None).line() == "BAR speed 0.500 >= 0.70 FAIL"
    assert goal.bar({}, "no CUDA device").line() == "BAR speed - >= 0.70 NOT-RUN (no CUDA device)"
    assert goal.bar({}, None).line() == "BAR speed - >= 0.70 NOT-RUN (not measured)"
    alone = Goal("ratio", "case", to_best_other, 0.9)
    assert alone.bar({"case": result(ours=2.0)}, None).line() == "BAR ratio - >= 0.90 NOT-RUN (not measured)"


def test_every_goal_names_a_case_of_the_full_run() -> None:
    attention = [
        *(f"paged_decode {step.name}" for step in FULL.decodes),
        *(f"paged_prefill {step.name} x {step.sequences}" for step in FULL.prefills),
    ]
    rowwise = [f"{op} {rows} rows" for op in ("fused_add_rms_norm", "silu_mul") for rows in FULL.rows]
    steps = [f"step of {LLAMA_3_8B.name} {step.name}" for step in STEPS]
    assert {goal.case for goal in GOALS} <= {*attention, *rowwise, *steps}


def test_a_row_of_the_result_file() -> None:
    values = json.loads(json.dumps(row(result(ours=2.0))))
    assert values["spreads"]["ours"]["median"] == 2.0
    assert (values["share"], values["to_best_other"]) == (0.5, None)


def every_case() -> Iterator[Case]:
    torch.manual_seed(0)
    return cases(TINY, SIZES, CPU)


def test_all_implementations_of_a_case_compute_the_same() -> None:
    names = []
    for case in every_case():
        names.append(case.name)
        expected = case.implementations[OURS]()
        for other, run_other in case.implementations.items():
            actual = run_other()
            if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and "bf16" not in other:
                shaped = actual.transpose(1, 2) if other == "sdpa" else actual
                torch.testing.assert_close(shaped.reshape(expected.shape), expected, rtol=0.05, atol=0.02)
    assert names[:5] == [
        "paged_decode decode 3 x 40",
        "paged_decode int8 decode 3 x 40",
        "paged_prefill prefill 20 x 1",
        "paged_prefill prefill 5 of 33 x 2",
        "qkv 3 rows",
    ]
    assert names[-1] == f"gather_blocks 2 x {16 * 2 * 2 * 2 * 16 * 2 / 1024:.0f} KiB"


def test_steps_give_the_same_logits_with_graphs_and_without() -> None:
    torch.manual_seed(0)
    steps = (Step(sequences=1, new=20, context=20), Step(sequences=3, new=1, context=20))
    made = list(step_cases(TINY, steps, CPU, EagerGraph))
    assert [case.name for case in made] == ["step of tiny prefill 20", "step of tiny decode 3 x 20"]
    ours, eager = (made[1].implementations[name]() for name in (OURS, EAGER))
    assert isinstance(ours, torch.Tensor)
    assert isinstance(eager, torch.Tensor)
    assert ours.shape == (3, TINY.vocab)
    torch.testing.assert_close(ours, eager)
    assert roofline.floor_s(H200, made[1].works) < roofline.floor_s(
        H200, roofline.step_kernels(TINY, steps[1], BFLOAT16)
    )


def test_a_flat_batch_by_hand() -> None:
    decode = flat_batch(TINY, Step(sequences=2, new=1, context=18))
    assert decode.slot_mapping.tolist() == [17, 32 + 17]
    assert decode.sample_rows.tolist() == [0, 1]
    assert decode.num_prefills == 0
    chunk = flat_batch(TINY, Step(sequences=2, new=3, context=18))
    assert chunk.positions.tolist() == [15, 16, 17, 15, 16, 17]
    assert chunk.slot_mapping.tolist() == [15, 16, 17, 47, 48, 49]
    assert chunk.sample_rows.tolist() == [2, 5]
    assert chunk.prefill_cu_seqlens.tolist() == [0, 3, 6]
    assert chunk.num_decodes == 0


def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels.bench_gpu", "--json", str(file)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(GOALS)
    assert all(line.endswith("NOT-RUN (no CUDA device)") for line in lines)
    written = json.loads(file.read_text())
    assert written["machine"]["device"] is None
    assert written["results"] == []
    assert [bar["why_not"] for bar in written["bars"]] == ["no CUDA device"] * len(GOALS)
