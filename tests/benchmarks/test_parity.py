"""Parity passes the engine's answers, and fails those that are not the library's."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from tests.benchmarks.parity import Case, rows_of, zoo_cases

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")


def statuses(case: Case) -> list[str]:
    return [row[-1] for row in rows_of(case, per_prompt=True)]


def test_answers_of_the_library_pass_and_others_fail(tmp_path):
    (case,) = zoo_cases(["qwen3"], tmp_path, EngineConfig(device="cpu"))
    assert isinstance(case, Case)
    assert statuses(case) == ["PASS"] * 2 * len(case.answers)
    first = case.answers["first"]
    other_tokens = replace(first, token_ids=(first.token_ids[0] ^ 1, *first.token_ids[1:]))
    moved = (replace(first.logprobs[0], top=tuple((token, value - 0.01) for token, value in first.logprobs[0].top)),)
    for wrong in (other_tokens, replace(first, logprobs=moved + first.logprobs[1:])):
        broken = replace(case, answers={**case.answers, "first": wrong})
        assert statuses(broken)[:2] == ["FAIL"] * 2 and statuses(broken)[2:] == ["PASS"] * 4
    missing = replace(case, config=case.config.model_copy(update={"model": str(tmp_path / "nowhere")}))
    assert statuses(missing) == ["FAIL"]


def test_a_family_that_the_library_cannot_compute_is_skipped_with_the_reason(tmp_path):
    """On a CPU MLX gathers products of float32 alone."""
    config = EngineConfig(device="cpu", dtype="bfloat16")
    skipped, compared = zoo_cases(["qwen3_moe", "qwen3"], tmp_path, config, bits=4)
    assert isinstance(skipped, list) and skipped[0] == "qwen3_moe" and skipped[-1] == "SKIP"
    assert "GatherMM" in skipped[6]
    assert isinstance(compared, Case) and statuses(compared) == ["PASS"] * 2 * len(compared.answers)
