"""PaliGemma's prompts, whose tokens see each other, and its answers, whose tokens see those before them."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import numpy as np  # isort: skip
import pytest
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.core.request_check import check_request
from engine.errors import EngineFailed, InvalidRequest
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, Progress, SamplingParams
from engine.worker.model_report import report
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.families.family import WINDOW
from tests.support.night import some_at_night
from tests.support.paligemma_family import ONE, TWO
from tests.support.sighted_family import SightedFamily
from tests.support.vision_zoo import image, make, reference

NUM_TOKENS = 6
WHY = "the tokens of its prompts see each other"


@dataclass(frozen=True)
class Served:
    path: Path
    runner: MLXRunner
    request: EngineRequest
    expected: list[int]


@pytest.fixture(scope="module", params=[ONE, TWO], ids=["gemma", "gemma2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family: SightedFamily = request.param
    path = make(tmp_path_factory.mktemp("zoo") / "model", family)
    tokenizer, patches = ChatTokenizer(path), ImagePreprocessor(path).patches(image(64, 40, seed=1))
    content = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": " and say what it is."}]
    prompt = tokenizer.chat_prompt(
        [{"role": "user", "content": content}], template_kwargs={}, placeholders=tokenizer.placeholders([patches])
    )
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
    asked = EngineRequest("one", prompt.token_ids, sampling, (), (patches,), boundaries=prompt.boundaries)
    pixels = family.pixels([image(64, 40, seed=1)])
    answer = reference(load_model(path), prompt.token_ids.tolist(), pixels, NUM_TOKENS, family)
    yield Served(path, load_cold(EngineConfig(model=str(path))), asked, answer.tokens)


def test_an_answer_that_is_computed_again_is_not_part_of_the_prompt(served: Served):
    """As after a preemption: the prompt and the tokens of the answer are one chunk, and only the prompt is a block."""
    for cut in range(1, NUM_TOKENS):
        continued = replace(served.request, progress=(Progress(tuple(served.expected[:cut])),))
        driver = Driver(served.runner)
        assert driver.run({0: [continued]})["one"] == served.expected[cut:]
    as_prompt = np.append(served.request.token_ids, served.expected[:3]).astype(np.int32)
    found = Driver(served.runner).run({0: [replace(served.request, token_ids=as_prompt)]})["one"]
    assert found[: NUM_TOKENS - 3] != served.expected[3:], "the same tokens in the prompt are another prompt"


def test_drafts_see_no_token_after_them(served: Served):
    repeated = np.concatenate([served.request.token_ids, served.request.token_ids[-30:]] * 2).astype(np.int32)
    asked = replace(served.request, token_ids=repeated, images=served.request.images * 2)
    asked = replace(asked, sampling=SamplingParams(24, temperature=0.0))
    config = EngineConfig(model=str(served.path))
    plain = Driver(served.runner, config).run({0: [asked]})["one"]
    drafting = EngineConfig.model_validate({"model": str(served.path), "prompt_lookup": {"max_draft_tokens": 4}})
    driver = Driver(load_cold(drafting), drafting)
    driver.run({0: [asked, replace(asked, request_id="two")], 2: [replace(served.request, request_id="three")]})
    assert driver.tokens["one"] == driver.tokens["two"] == plain
    assert driver.tokens["three"] == served.expected


def test_choices_share_a_prompt(served: Served):
    driver = Driver(served.runner)
    driver.run({0: [replace(served.request, num_choices=2)]})
    assert driver.tokens["one"] == driver.tokens["one/1"] == served.expected


def test_requests_that_need_the_state_of_a_part_of_the_prompt_are_refused_by_name(served: Served):
    def refusal(**fields: Any) -> str:
        text = EngineRequest("text", np.arange(20, 40, dtype=np.int32), SamplingParams(1), (), **fields)
        with pytest.raises(InvalidRequest) as refused:
            check_request(text, EngineConfig(), served.runner)
        return str(refused.value.args[0])

    assert refusal(prompt_logprobs=0) == f"the prompts of this model have no logprobs: {WHY}"
    assert refusal(pooling="last") == f"this model cannot compute embeddings: {WHY}"
    assert served.runner.no_sparse == served.runner.no_bursts == WHY


def test_prompts_may_be_longer_than_a_window(served: Served):
    assert len(served.request.token_ids) > 2 * WINDOW
    assert served.runner.max_context_tokens == 4096
    with pytest.raises(EngineFailed, match="max_context_tokens is 8192; the model's limit is 4096"):
        load_cold(EngineConfig(model=str(served.path), max_context_tokens=8192))


@pytest.mark.parametrize(
    "served",
    some_at_night([ONE, TWO], [ONE], "the self-test asks the same of both, the tests above of their layers"),
    ids=["gemma", "gemma2"],
    indirect=True,
)
def test_self_test_finds_nothing_wrong(served: Served):
    command = [sys.executable, "-m", "engine", "--self-test", "--quick", "--device", "cpu", "--model", str(served.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for name in ("snapshot hit = miss, memory", "snapshot hit = miss, disk", "sparse, keep 1 = dense", "prefix cache"):
        assert [line for line in lines if line.startswith(f"SKIP  {name}") and WHY in line], done.stdout
    for name in ("decode against prefill", "alone = batch", "prompt lookup on = off", "image, alone = batch"):
        assert [line for line in lines if line.startswith(f"PASS  {name}")], done.stdout


def test_report_on_a_checkpoint_says_what_its_prompts_rule_out(served: Served):
    lines = list(report(EngineConfig(model=str(served.path))))
    for line in (
        f"prefix cache     no: {WHY}",
        f"bursts           {WHY}",
        f"sparse prefill   no: {WHY}",
        f"embeddings       {WHY}",
        "prompt lookup    yes",
    ):
        assert line in lines
