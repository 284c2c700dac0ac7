import asyncio
import pickle
from dataclasses import replace

import pytest

from deployments.planners.prompt_planner import PromptPlanner, sampling_params
from deployments.requests import ChatRequest, PackedMessages, Thinking, Tool
from engine.config import EngineConfig, PrefixCacheConfig
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest
from engine.processing.generation_defaults import GenerationDefaults
from engine.processing.prompt_origin import prompt_origin
from engine.protocol import EngineRequest, GrammarSpec, PromptOrigin, SamplingParams

DEFAULTS = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)


@pytest.fixture(scope="module")
def planner() -> PromptPlanner:
    return PromptPlanner(EngineConfig())


def request(text: str = "What is 12 + 30?", **options) -> ChatRequest:
    return ChatRequest("r", ({"role": "user", "content": text},), **options)


def plan(planner: PromptPlanner, request: ChatRequest) -> EngineRequest:
    return asyncio.run(planner.engine_request(request, request.messages))


def test_planned_request_has_token_ids_stop_tokens_and_sampling(planner: PromptPlanner):
    planned = plan(planner, request(max_tokens=5, seed=7))
    assert planned.request_id == "r"
    assert planned.token_ids.dtype == "int32" and planned.token_ids.ndim == 1
    assert set(planned.stop_token_ids) == {0, 2}
    assert (planned.sampling.max_tokens, planned.sampling.seed) == (5, 7)


def test_max_tokens_defaults_to_the_rest_of_the_context(planner: PromptPlanner):
    planned = plan(planner, request())
    assert planned.sampling.max_tokens == 32768 - len(planned.token_ids)


def test_the_configured_context_is_a_limit_below_that_of_the_model():
    small = PromptPlanner(EngineConfig(max_context_tokens=64))
    assert plan(small, request(max_tokens=10)).sampling.max_tokens == 10
    clamped = plan(small, request(max_tokens=60))
    assert clamped.sampling.max_tokens == 64 - len(clamped.token_ids) < 60
    with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 64 tokens.*and 1 for the answer"):
        plan(small, request("apple " * 100))
    with pytest.raises(EngineFailed, match=r"1000000.*32768"):
        PromptPlanner(EngineConfig(max_context_tokens=10**6))


def test_messages_refused_by_the_chat_template_are_an_invalid_request(planner: PromptPlanner):
    with pytest.raises(InvalidRequest, match="template"):
        plan(planner, ChatRequest("r", ({"role": "wizard", "content": "x"},)))


def test_missing_model_is_named():
    with pytest.raises(EngineFailed, match="no-such-model"):
        PromptPlanner(EngineConfig(model="./no-such-model"))


def test_sampling_parameters_of_the_client_override_those_of_the_model():
    asked = sampling_params(request(temperature=0.0, top_k=0, max_tokens=3), DEFAULTS, 10, 100)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.0, 0.8, 0, 0.1)
    silent = sampling_params(request(), DEFAULTS, 10, 100)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.max_tokens) == (0.7, 0.8, 20, 90)


def test_requests_without_a_seed_get_different_seeds():
    seeds = {sampling_params(request(), DEFAULTS, 1, 10).seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**64 for seed in seeds)
    assert sampling_params(request(seed=-1), DEFAULTS, 1, 10).seed == 2**64 - 1


def test_max_tokens_is_a_ceiling_that_the_context_lowers():
    for asked, given in ((89, 89), (90, 90), (91, 90), (32000, 90), (None, 90)):
        assert sampling_params(request(max_tokens=asked), DEFAULTS, 10, 100).max_tokens == given
    for asked, num_prompt, needed in ((5, 100, 1), (None, 100, 1), (5, 97, 4)):
        with pytest.raises(ContextLengthExceeded) as error:
            least = 4 if needed == 4 else 0
            sampling_params(request(max_tokens=asked, min_tokens=least), DEFAULTS, num_prompt, 100)
        assert error.value.args == (num_prompt, needed, 100, False)


def test_sampling_parameters_grammar_and_priority_reach_the_engine(planner: PromptPlanner):
    sampling = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, -100.0), (7, 3.5)),
        "min_tokens": 2,
        "logprobs": 3,
    }
    grammar = GrammarSpec("json_schema", "{}", "structured_outputs.json")
    planned = plan(planner, request(max_tokens=5, num_choices=3, grammar=grammar, priority=-2, **sampling))
    assert {name: getattr(planned.sampling, name) for name in sampling} == sampling
    assert (planned.num_choices, planned.grammar, planned.priority) == (3, grammar, -2)


def test_request_without_options_gets_a_single_choice_and_no_grammar(planner: PromptPlanner):
    planned = plan(planner, request(max_tokens=5, seed=1))
    asked = planned.sampling
    assert asked == SamplingParams(5, asked.temperature, asked.top_p, asked.top_k, asked.min_p, seed=1)
    assert (planned.num_choices, planned.grammar, planned.priority) == (1, None, 0)


def test_stop_tokens_of_the_client_join_those_of_the_model(planner: PromptPlanner):
    assert plan(planner, request(stop_token_ids=(7, 2, 4095))).stop_token_ids == (0, 2, 7, 4095)
    with pytest.raises(
        InvalidRequest, match=r"stop_token_ids\[1\] is 4096; this model's token ids are 0 to 4095"
    ) as error:
        plan(planner, request(stop_token_ids=(7, 4096)))
    assert error.value.field == "stop_token_ids[1]"


def test_min_tokens_above_max_tokens_is_refused(planner: PromptPlanner):
    assert plan(planner, request(max_tokens=5, min_tokens=5)).sampling.min_tokens == 5
    with pytest.raises(InvalidRequest, match="min_tokens is 6; it must be between 0 and 5") as error:
        plan(planner, request(max_tokens=5, min_tokens=6))
    assert error.value.field == "min_tokens"


# --- what the prefix cache needs to know ---------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def test_prompt_has_system_and_turn_boundaries_that_later_prompts_share(planner: PromptPlanner):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    planned = plan(planner, ChatRequest("r", messages))
    assert [boundary.kind for boundary in planned.boundaries] == ["system", "turn"]
    answered = (*messages, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"})
    later = plan(planner, ChatRequest("r", answered))
    for boundary in planned.boundaries:
        assert later.token_ids[: boundary.num_tokens].tolist() == planned.token_ids[: boundary.num_tokens].tolist()
    assert later.boundaries[0] == planned.boundaries[0]


def test_prompt_without_a_prefix_cache_has_no_boundaries_and_no_origin(planner: PromptPlanner):
    off = PromptPlanner(EngineConfig(prefix_cache=PrefixCacheConfig(enabled=False)))
    asked = request(tools=(WEATHER,), max_tokens=5)
    cut, whole = plan(planner, asked), plan(off, asked)
    assert whole.token_ids.tolist() == cut.token_ids.tolist()
    assert (whole.boundaries, whole.origin) == ((), PromptOrigin())
    assert cut.boundaries and cut.origin.tools


def test_boundaries_can_be_found_without_a_prefix_cache(planner: PromptPlanner):
    off = PromptPlanner(EngineConfig(prefix_cache=PrefixCacheConfig(enabled=False)), finds_boundaries=True)
    assert plan(off, request()).boundaries == plan(planner, request()).boundaries != ()


def test_origin_has_digests_of_the_tools_and_template_kwargs_of_a_prompt(planner: PromptPlanner):
    assert plan(planner, request(tools=(WEATHER,))).origin == prompt_origin({"tools": [WEATHER.definition]})
    plain, tools, thinking = (prompt_origin(kwargs) for kwargs in ({}, {"tools": TOOLS}, {"enable_thinking": True}))
    assert plain == PromptOrigin("", "")
    assert tools.tools and not tools.template_kwargs
    assert thinking.template_kwargs and not thinking.tools
    assert prompt_origin({"tools": TOOLS, "enable_thinking": True}) == PromptOrigin(
        tools.tools, thinking.template_kwargs
    )


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {"tools": []}, {"tools": None}])
def test_default_template_kwargs_do_not_change_the_origin(kwargs: dict):
    assert prompt_origin(kwargs) == PromptOrigin()
    assert prompt_origin({**kwargs, "lang": "en"}) == prompt_origin({"lang": "en"})


def test_origin_digests_are_stable_and_distinct():
    assert prompt_origin({"a": 1, "b": [2]}) == prompt_origin({"b": [2], "a": 1})
    assert prompt_origin({"tools": TOOLS}).tools == "23f0c3dec7902f96"
    distinct = [{"a": 1}, {"a": "1"}, {"b": 1}, {"a": 1, "b": 1}, {"enable_thinking": None}, {"a": {"b": 1, "c": 2}}]
    assert len({prompt_origin(kwargs) for kwargs in [*distinct, {"a": {"c": 2, "b": 1}}]}) == 7


def test_client_and_tenant_of_a_request_reach_the_engine(planner: PromptPlanner):
    planned = plan(planner, request(client="ann", tenant="t", max_tokens=5))
    assert (planned.client, planned.tenant) == ("ann", "t")
    planned = plan(planner, request())
    assert (planned.client, planned.tenant) == ("", "")


WEATHER = Tool("get_weather", "Weather", {"type": "object", "properties": {"city": {"type": "string"}}})


def test_tools_are_shown_to_the_model_and_constrain_its_answer(planner: PromptPlanner):
    plain, planned = plan(planner, request()), plan(planner, request(tools=(WEATHER,)))
    shown = planner.tokenizer._tokenizer.decode(planned.token_ids.tolist(), skip_special_tokens=False)
    assert '"name": "get_weather"' in shown
    assert planned.grammar is not None and "get_weather" in planned.grammar.text
    assert planned.origin.tools and not plain.origin.tools
    hidden = plan(planner, request(tools=(replace(WEATHER, is_deferred=True),)))
    assert hidden.token_ids.tolist() == plain.token_ids.tolist()
    assert hidden.grammar == planned.grammar


def test_thinking_is_opened_in_the_prompt_and_its_budget_is_passed_on(planner: PromptPlanner):
    planned = plan(planner, request(thinking=Thinking("on", 7)))
    assert planned.thought is not None and planned.thought.budget == 7
    assert planned.token_ids.tolist() != plan(planner, request()).token_ids.tolist()
    for thinking in (None, Thinking("off")):
        assert plan(planner, request(thinking=thinking)).thought is None
    assert plan(planner, request(thinking=Thinking("on"))).thought is None, "nothing to watch"


def test_an_answer_goes_on_behind_stop_tokens_on_request(planner: PromptPlanner):
    assert plan(planner, request(ignore_eos=True, stop_token_ids=(7,))).stop_token_ids == (7,)


def test_prompt_far_beyond_the_context_is_refused_after_tokenizing_a_fraction_of_its_text(planner: PromptPlanner):
    """Counted by what is given to the tokenizer, as times depend on the machine."""
    encoded: list[int] = []
    tokenizer = planner.tokenizer._tokenizer

    class Counting:
        def __getattr__(self, name: str):
            method = getattr(tokenizer, name)
            if not name.startswith("encode"):
                return method

            def counted(text, **how):
                encoded.append(len(text) if isinstance(text, str) else sum(map(len, text)))
                return method(text, **how)

            return counted

    planner.tokenizer._tokenizer = Counting()  # type: ignore[assignment]
    try:
        with pytest.raises(ContextLengthExceeded, match="at least") as error:
            plan(planner, request("word tree 12 apple " * 200_000, max_tokens=5))
    finally:
        planner.tokenizer._tokenizer = tokenizer
    assert error.value.field == "messages" and error.value.args[2] == 32768
    assert sum(encoded) < 500_000


def test_planner_serves_the_next_request_after_a_cancelled_large_request(planner: PromptPlanner):
    async def story() -> None:
        asked = request("<|im_end|> word " * 100_000)
        left = asyncio.create_task(planner.engine_request(asked, asked.messages))
        await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        small = request("Hi")
        await planner.engine_request(small, small.messages)

    asyncio.run(story())


def test_packed_messages_give_the_same_prompt_as_plain_messages(planner: PromptPlanner):
    asked = request("What is 12 + 30?")
    packed = replace(asked, messages=PackedMessages.of(asked.messages))
    there = pickle.loads(pickle.dumps(packed))  # noqa: S301
    assert plan(planner, there).token_ids.tolist() == plan(planner, asked).token_ids.tolist()
