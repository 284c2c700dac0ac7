"""A request is refused on arrival only if it could never be served."""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.request_check import check_request
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.protocol import EngineRequest, SamplingParams
from tests.support.fake_runner import VOCAB_SIZE, FakeRunner

CONTEXT = 100


def check(num_tokens: int, max_tokens: int, **fields) -> None:
    runner = FakeRunner()
    runner.max_context_tokens = CONTEXT
    token_ids = np.ones(num_tokens, np.int32)
    check_request(EngineRequest("a", token_ids, SamplingParams(max_tokens), (), **fields), EngineConfig(), runner)


def test_a_prompt_whose_answer_just_fits_is_accepted_and_a_longer_one_refused_with_the_numbers():
    for num_tokens in (1, 40, 99):
        check(num_tokens, CONTEXT - num_tokens)
        with pytest.raises(ContextLengthExceeded) as refused:
            check(num_tokens, CONTEXT - num_tokens + 1)
        assert refused.value.args[:3] == (num_tokens, CONTEXT - num_tokens + 1, CONTEXT)


def test_a_prompt_may_have_tokens_without_a_logit_whose_logprobs_it_cannot_ask_for():
    runner, config = FakeRunner(), EngineConfig()
    runner.num_embeddings = VOCAB_SIZE + 8
    request = EngineRequest("a", np.array([1, VOCAB_SIZE + 7], np.int32), SamplingParams(1), ())
    check_request(request, config, runner)
    with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE + 8} is not between 0 and {VOCAB_SIZE + 7}"):
        check_request(replace(request, token_ids=np.array([VOCAB_SIZE + 8], np.int32)), config, runner)
    with pytest.raises(InvalidRequest, match=f"has the token id {VOCAB_SIZE + 7}, .* ids up to {VOCAB_SIZE - 1}"):
        check_request(replace(request, prompt_logprobs=0), config, runner)
    with pytest.raises(InvalidRequest, match=f"stop token id {VOCAB_SIZE} is not between 0 and {VOCAB_SIZE - 1}"):
        check_request(replace(request, stop_token_ids=(VOCAB_SIZE,)), config, runner)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="the prompt has 0 tokens"):
        check(0, 1)


def test_as_many_choices_as_rows_are_accepted_and_one_more_refused():
    most = EngineConfig().max_running
    check(1, 1, num_choices=most)
    with pytest.raises(InvalidRequest, match=f"n is {most + 1}; it must be between 1 and {most}"):
        check(1, 1, num_choices=most + 1)


def test_pairs_and_the_state_of_the_first_token_need_an_encoder():
    check(8, 1, pooling="last")
    for fields in ({"pooling": "cls"}, {"pooling": "last", "pair_start": 3}):
        with pytest.raises(InvalidRequest, match="need an encoder; this model's first token sees only itself"):
            check(8, 1, **fields)
