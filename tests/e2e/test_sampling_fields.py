"""Grammars, logprobs, several choices, penalties and biases, through the client that people use."""

import json
import math
import re
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.processing.checkpoint import DEMO_MODEL
from engine.protocol import choice_seed

pytestmark = pytest.mark.server

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
SUM = "What is 12 + 30?"
STORY = "Tell me a story."
CITY = {"enum": ["Paris", "Rome"]}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, **options}
    return client.chat.completions.create(model="demo", messages=messages, **asked)


def content(answer: Any) -> str:
    return answer.choices[0].message.content


def schema(properties: dict[str, Any]) -> Any:
    rules = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "place", "schema": rules, "strict": True}}


def signed(seed: int) -> int:
    """As the wire takes it."""
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("properties", [{"city": CITY, "count": COUNT}, {"count": COUNT, "city": CITY}])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answer_follows_the_schema_with_keys_in_schema_order(
    client: openai.OpenAI, properties: dict[str, Any], temperature: float
):
    answer = ask(client, STORY, response_format=schema(properties), temperature=temperature, seed=3, max_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    said = json.loads(content(answer))
    assert list(said) == list(properties)
    assert said["city"] in ("Paris", "Rome") and said["count"] in range(100)


def test_structured_outputs_json_constrains_the_answer_to_the_schema(client: openai.OpenAI):
    rules = schema({"city": CITY})["json_schema"]["schema"]
    answer = ask(client, STORY, extra_body={"structured_outputs": {"json": rules}}, max_tokens=400)
    assert json.loads(content(answer))["city"] in ("Paris", "Rome")


def test_json_object_format_gives_a_json_object(client: openai.OpenAI):
    answer = ask(client, STORY, response_format={"type": "json_object"}, max_tokens=300)
    assert content(answer).lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content(answer)), dict)


@pytest.mark.parametrize("pattern", ["[A-F]{3}-[0-9]{2}", "(red|blau|grün) 🙂"])
def test_a_regex_is_matched_to_its_end(client: openai.OpenAI, pattern: str):
    answer = ask(client, STORY, extra_body={"structured_outputs": {"regex": pattern}}, temperature=1, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, content(answer))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs.json"),
        ({"response_format": schema({"a": {"type": 5}})}, "response_format.json_schema.schema"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"stop_token_ids": [4096]}, "stop_token_ids[0]"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"priority": 1}, "priority"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.night("hostile rows go through the whole graph in tests/golden")
def test_field_refused_by_the_engine_is_a_400_that_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, SUM, extra_body=fields, stream=stream)
    assert refused.value.param == param


@pytest.mark.parametrize("options", [{}, {"stop": [" 5"]}], ids=str)
def test_logprobs_have_an_entry_for_every_token_and_match_greedy_choices(
    client: openai.OpenAI, options: dict[str, Any]
):
    answer = ask(client, "Count from 1 to 9.", logprobs=True, top_logprobs=5, **options)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens > 5
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().startswith(content(answer))
    for entry in entries:
        top = [other.logprob for other in entry.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        assert entry.logprob == top[0] <= 0, "greedy takes the best"
        assert sum(map(math.exp, top)) < 1.001
    (bare, *_) = ask(client, "Count from 1 to 9.", logprobs=True, **options).choices[0].logprobs.content
    assert bare.top_logprobs == [] and bare.logprob == pytest.approx(entries[0].logprob, abs=1e-3)


def read(stream: Any) -> tuple[dict[int, str], dict[int, list[str]], dict[int, str], Any]:
    """text, tokens and finish reason per choice, and usage."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            entries = choice.logprobs.content if choice.logprobs else []
            tokens.setdefault(choice.index, []).extend(entry.token for entry in entries)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, tokens, reasons, usage


def test_choices_equal_the_answers_to_their_own_seeds_streamed_or_not(client: openai.OpenAI):
    asked: dict[str, Any] = {"temperature": 2, "max_tokens": 24, "logprobs": True}
    whole = ask(client, STORY, n=3, seed=5, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert texts == [content(ask(client, STORY, seed=signed(choice_seed(5, i)), **asked)) for i in range(3)]
    streamed = ask(client, STORY, n=3, seed=5, stream=True, stream_options={"include_usage": True}, **asked)
    by_index, tokens, reasons, usage = read(streamed)
    assert [by_index[i] for i in range(3)] == texts
    assert [tokens[i] for i in range(3)] == [[e.token for e in choice.logprobs.content] for choice in whole.choices]
    assert [reasons[i] for i in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, tokens.values()))
    assert usage.prompt_tokens == ask(client, STORY, **asked).usage.prompt_tokens


def test_each_choice_ends_at_its_own_stop_string(client: openai.OpenAI):
    asked: dict[str, Any] = {"temperature": 1.3, "max_tokens": 40, "seed": 5, "n": 4}
    free = [choice.message.content for choice in ask(client, STORY, **asked).choices]
    stopped = ask(client, STORY, **asked, stop=["a"]).choices
    assert [choice.message.content for choice in stopped] == [text.split("a")[0] for text in free]
    assert all(choice.finish_reason == "stop" for choice, text in zip(stopped, free, strict=True) if "a" in text)


@pytest.mark.night("deployments/http/test_in_flight.py refuses them")
def test_more_choices_than_max_running_are_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, SUM, n=128, max_tokens=1)
    assert refused.value.param == "n"
    assert "128" in refused.value.message


def test_choices_of_a_schema_are_all_valid(client: openai.OpenAI):
    form = schema({"city": CITY, "count": COUNT})
    asked: dict[str, Any] = {"response_format": form, "n": 3, "temperature": 1, "seed": 2, "max_tokens": 400}
    texts, tokens, reasons, _ = read(ask(client, STORY, stream=True, logprobs=True, **asked))
    assert set(reasons.values()) == {"stop"}
    for index, text in texts.items():
        assert list(json.loads(text)) == ["city", "count"]
        assert "".join(tokens[index]) == text


def test_logit_bias_forces_and_forbids_tokens(client: openai.OpenAI):
    (token_id,) = TOKENIZER.encode(" red", add_special_tokens=False).ids
    assert content(ask(client, SUM, logit_bias={str(token_id): 100}, max_tokens=3)) == " red red red"
    (first, *_) = ask(client, SUM, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    forbidden = {TOKENIZER.encode(first.token, add_special_tokens=False).ids[0]: -100}
    (other, *_) = ask(client, SUM, logprobs=True, logit_bias=forbidden).choices[0].logprobs.content
    assert other.token == first.top_logprobs[1].token
    assert other.logprob == pytest.approx(first.top_logprobs[1].logprob, abs=1e-3), "logprobs are the model's own"


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}])
def test_penalties_reduce_the_repetition_of_tokens(client: openai.OpenAI, penalty: dict[str, Any]):
    def most_repeated(**extra: Any) -> int:
        tokens = [entry.token for entry in ask(client, STORY, **asked, extra_body=extra).choices[0].logprobs.content]
        return max(map(tokens.count, tokens))

    asked: dict[str, Any] = {"logprobs": True, "max_tokens": 60}
    bias = {str(TOKENIZER.encode(" red", add_special_tokens=False).ids[0]): 20}
    assert most_repeated(logit_bias=bias, **penalty) < most_repeated(logit_bias=bias)


def test_a_repetition_penalty_makes_words_rarer(client: openai.OpenAI):
    def most_repeated(**extra: Any) -> int:
        answer = ask(client, STORY, logprobs=True, max_tokens=60, extra_body=extra)
        tokens = [entry.token for entry in answer.choices[0].logprobs.content]
        return max(map(tokens.count, tokens))

    assert most_repeated(repetition_penalty=5) < most_repeated()


def test_an_answer_cannot_end_before_min_tokens(client: openai.OpenAI):
    plain = ask(client, SUM)
    assert plain.choices[0].finish_reason == "stop"
    longer = ask(client, SUM, extra_body={"min_tokens": plain.usage.completion_tokens + 5})
    assert longer.usage.completion_tokens >= plain.usage.completion_tokens + 5
    assert content(longer).startswith(content(plain))


def test_stop_token_of_the_client_ends_the_answer_and_is_left_out_of_the_text(client: openai.OpenAI):
    plain = content(ask(client, "Count from 1 to 9."))
    ids = TOKENIZER.encode(plain, add_special_tokens=False).ids
    stop = next(token_id for token_id in ids if ids.index(token_id) >= 4)
    stopped = ask(client, "Count from 1 to 9.", extra_body={"stop_token_ids": [stop]})
    assert content(stopped) == TOKENIZER.decode(ids[: ids.index(stop)])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == ids.index(stop)


def test_usage_has_the_numbers_of_drafted_and_accepted_tokens(client: openai.OpenAI):
    details = ask(client, STORY).usage.completion_tokens_details
    assert 0 <= details.accepted_draft_tokens <= details.drafted_tokens
