"""A prompt with tokens for which the output layer has no logit, as those around Molmo2's images are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mlx_vlm.utils import load_model

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.model_runner import MLXRunner
from engine.worker.prompt_lookup import TokenHistory
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.families.family import VOCAB_SIZE
from tests.support.molmo2_family import MOLMO2
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, make, reference

NUM_TOKENS = 8
MOVED = {IDS[name]: VOCAB_SIZE + i for i, name in enumerate(("<image>", "<start>", "<end>", "<break>", "<global-img>"))}
"""Ids of the tokens around an image behind the last logit."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[MLXRunner, EngineRequest, Any]:
    """A runner, a request about an image, and the library's answer."""
    tokens = {"image_patch_id": MOVED[IDS["<image>"]], "image_end_token_id": MOVED[IDS["<end>"]]}
    path = tmp_path_factory.mktemp("zoo")
    made = make(path / "model", replace(MOLMO2, config={**MOLMO2.config, **tokens}))
    tokenizer = ChatTokenizer(make(path / "low", MOLMO2))
    picture = image(64, 40)
    patches = ImagePreprocessor(made).patches(picture)
    content = [{"type": "text", "text": "See see see see "}, {"type": "image"}, {"type": "text", "text": " and see"}]
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": content}], template_kwargs={}, placeholders=[tokenizer.placeholder(patches)]
    )
    ids = np.array([MOVED.get(token_id, token_id) for token_id in ids.tolist()], np.int32)
    answer = reference(load_model(made), ids.tolist(), MOLMO2.pixels([picture]), NUM_TOKENS)
    request = EngineRequest("one", ids, SamplingParams(NUM_TOKENS, temperature=0.0), (), (patches,))
    return load_cold(EngineConfig(model=str(made))), request, answer


def test_the_answer_is_that_of_the_library(asked):
    runner, request, answer = asked
    assert (runner.vocab_size, runner.num_embeddings) == (VOCAB_SIZE, VOCAB_SIZE + 8)
    driver = Driver(runner, EngineConfig())
    driver.run({0: [request]})
    assert driver.errors["one"] is None and driver.tokens["one"] == answer.tokens


def test_penalties_and_prompt_lookup_pass_them_over(asked, monkeypatch):
    """Prompt lookup would draft them."""
    monkeypatch.setattr(TokenHistory, "drafts", lambda self, num_tokens: [VOCAB_SIZE + 3] * num_tokens)
    monkeypatch.setattr(TokenHistory, "has_drafts", True)
    runner, request, _ = asked
    request = replace(request, sampling=replace(request.sampling, repetition_penalty=1.3, presence_penalty=0.5))
    tokens = []
    for lookup in ("off", {"max_draft_tokens": 4}):
        driver = Driver(runner, EngineConfig.model_validate({"prompt_lookup": lookup}))
        driver.run({0: [request]})
        assert driver.errors["one"] is None
        assert (driver.core.figures.speculation["prompt_lookup"]["num_drafted"] > 0) == (lookup != "off")
        tokens.append(driver.tokens["one"])
    assert tokens[0] == tokens[1]
