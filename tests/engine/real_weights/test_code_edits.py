"""SmolLM2-135M-Instruct in float32 edits modules of this repository: prompt lookup changes no token and no logprob.

So small a model copies most of a module and loses itself then, so its own answers are compared, and the true ones,
which a matcher forces: their logprobs are the model's own, before the grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import TokenChunk
from engine.worker.model_runner import MLXRunner
from tests.support.code_edits import EDITS, CodeEdit
from tests.support.real_weights import NO_CACHE, check, driver, float32_smollm2, greedy, load_engine, plain_answer
from tests.support.script import Script

pytestmark = pytest.mark.night("drafts of prompt lookup are verified with tiny models in the gate")

NUM_TOKENS = 120
"""Tokens of an answer, of which the first are those of the module's beginning."""
LOOKUP: dict[str, Any] = {"prompt_lookup": {"max_draft_tokens": 8}}
LOGPROB_TOLERANCE = 1e-3
"""Per token: forwards over nine tokens round otherwise than those over one."""


@dataclass(frozen=True)
class Model:
    """The checkpoint in the engine, and its tokenizer."""

    runner: MLXRunner
    tokenizer: ChatTokenizer

    def forced(self, edit: CodeEdit, **config: Any) -> list[TokenChunk]:
        """Return the chunks of the true answer."""
        answer, forcing = edit.answer(self.tokenizer), driver(self.runner, **NO_CACHE, **config)
        request = greedy("r", edit.prompt(self.tokenizer).tolist(), len(answer))
        forcing.core.add_request(request, [Script(answer, self.runner.vocab_size)])
        forcing.run({0: ()})
        assert forcing.tokens["r"] == answer.tolist()
        return forcing.chunks["r"]


@pytest.fixture(scope="module")
def model() -> Model:
    path = float32_smollm2()
    return Model(load_engine(path, **LOOKUP), ChatTokenizer(path))


def accepted(chunks: Sequence[TokenChunk]) -> int:
    return sum(chunk.num_accepted for chunk in chunks)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.path)
def test_answer_to_an_edit_with_prompt_lookup_is_the_plain_one(model: Model, edit: CodeEdit):
    prompt, drafting = edit.prompt(model.tokenizer).tolist(), driver(model.runner, **NO_CACHE, **LOOKUP)
    drafting.run({0: [greedy("r", prompt, NUM_TOKENS)]})
    assert accepted(drafting.chunks["r"]) > 0
    assert len(drafting.tokens["r"]) == NUM_TOKENS
    assert len(check(plain_answer(model.runner), prompt, drafting.tokens["r"])) <= 1


@pytest.mark.parametrize("edit", EDITS[::3], ids=lambda edit: edit.path)
def test_true_answer_with_prompt_lookup_has_the_logprobs_of_plain_decoding(model: Model, edit: CodeEdit):
    plain, drafted = model.forced(edit), model.forced(edit, **LOOKUP)
    logprobs = [[one.logprob for chunk in chunks for one in chunk.logprobs] for chunks in (plain, drafted)]
    np.testing.assert_allclose(logprobs[1], logprobs[0], rtol=0, atol=LOGPROB_TOLERANCE)
    assert accepted(drafted) > len(logprobs[0]) / 2 and accepted(plain) == 0
