"""The prefix cache as a client and an operator see it: cached tokens in the usage, and `/v1/cache`."""

import uuid
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.pictures import about, image_part, shape

pytestmark = pytest.mark.server

QUESTION = "The red square is above the green circle. The green circle is above the black star. What is your name?"
"""Longer, like the system part below, than what a boundary must save."""
GENERATION_PROMPT = 16
"""Tokens behind the last turn, at most."""

REASONS = {"cold", "evicted", "cleared", "tenant", "image", "tools", "template_kwargs", "text"}


def ask(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    asked: Any = {"temperature": 0, "max_tokens": 40, **options}
    return client.chat.completions.create(model="demo", messages=messages, **asked)  # pyright: ignore


def salted(client: openai.OpenAI, messages: list[dict[str, Any]], salt: str) -> Any:
    return ask(client, messages, extra_body={"cache_salt": salt})


def content(answer: Any) -> str:
    return answer.choices[0].message.content


def num_cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def somebody() -> str:
    """A name that no request has had before, at the start of a prompt: nothing of it is in the cache."""
    return uuid.uuid4().hex


def conversation(system: str, question: str = QUESTION) -> list[dict[str, Any]]:
    rules = " ".join(["The blue square is to the left of the green circle."] * 8)
    return [{"role": "system", "content": f"{system} {rules}"}, {"role": "user", "content": question}]


def engine_cache(http: httpx.Client) -> dict[str, Any]:
    body = http.get("/v1/cache").json()
    assert body["missing"] == []
    (engine,) = body["engines"]
    assert engine["off"] is None
    assert engine["totals"] == body["totals"], "there is one engine"
    return engine


def miss_of(http: httpx.Client, answer: Any) -> dict[str, Any]:
    """Why this answer's prompt was not served (further) from the cache."""
    (found,) = [miss for miss in engine_cache(http)["recent_misses"] if miss["request_id"] == answer.id]
    assert found["num_prompt_tokens"] == answer.usage.prompt_tokens
    assert found["num_cached"] == num_cached(answer)
    return found


def test_repeated_prompt_is_served_from_the_cache_with_the_same_answer(client: openai.OpenAI, http: httpx.Client):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.")
    before = http.get("/v1/status").json()["engines"][0]["engine"]["num_cached_tokens"]
    first, second = ask(client, messages), ask(client, messages)
    assert num_cached(first) == 0
    assert 0 < second.usage.prompt_tokens - num_cached(second) <= GENERATION_PROMPT
    assert content(second) == content(first)
    after = http.get("/v1/status").json()["engines"][0]["engine"]["num_cached_tokens"]
    assert after - before == num_cached(second)


def test_sampled_choices_are_the_same_with_and_without_the_cache(client: openai.OpenAI):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.", "Tell me a story.")
    asked: dict[str, Any] = {"temperature": 1.5, "seed": 5, "n": 3}
    first, second = ask(client, messages, **asked), ask(client, messages, **asked)
    assert [choice.message.content for choice in second.choices] == [choice.message.content for choice in first.choices]
    assert num_cached(first) == 0
    assert 0 < num_cached(second) < second.usage.prompt_tokens, "the prompt is counted once, for all choices"


def test_usage_of_a_stream_has_the_cached_tokens(client: openai.OpenAI):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.")
    whole = [ask(client, messages), ask(client, messages)][-1]
    *chunks, last = ask(client, messages, stream=True, stream_options={"include_usage": True})
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == content(whole)
    assert num_cached(last) == num_cached(whole) > 0


def test_next_turn_of_a_conversation_uses_the_cached_prefix_of_the_previous_turn(client: openai.OpenAI):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.")
    first = ask(client, messages)
    messages += [{"role": "assistant", "content": content(first)}, {"role": "user", "content": "Where do you live?"}]
    second = ask(client, messages)
    assert num_cached(second) >= first.usage.prompt_tokens - GENERATION_PROMPT


def test_question_after_a_cached_system_prompt_uses_the_cached_system_part(client: openai.OpenAI):
    system = f"You are {somebody()}, a baker from Oakdale."
    alone = ask(client, conversation(system, "Where do you live?"))
    other = ask(client, conversation(system, "What is your name?"))
    assert num_cached(alone) == 0
    assert 0 < other.usage.prompt_tokens - num_cached(other) < 32


def test_requests_share_cached_prefixes_only_within_a_cache_salt(client: openai.OpenAI, http: httpx.Client):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.")
    ann, bob = somebody(), somebody()
    first = salted(client, messages, ann)
    others = [salted(client, messages, bob), ask(client, messages)]
    assert [num_cached(answer) for answer in (first, *others)] == [0, 0, 0]
    assert miss_of(http, others[0])["reason"] == miss_of(http, others[1])["reason"] == "tenant"
    assert "cache_salt" in miss_of(http, others[0])["explanation"]
    again = [salted(client, messages, ann), salted(client, messages, bob), ask(client, messages)]
    assert all(num_cached(answer) > 0 for answer in again)
    assert len({content(answer) for answer in (first, *others, *again)}) == 1
    for salt in (ann, bob):
        assert salt not in http.get("/v1/cache").text


def test_cache_page_lists_entries_and_explains_a_changed_system_text(client: openai.OpenAI, http: httpx.Client):
    name = somebody()
    stored = ask(client, conversation(f"You are {name}, a blue baker from Oakdale."))
    changed = ask(client, conversation(f"You are {name}, a red baker from Oakdale."))
    engine = engine_cache(http)
    totals, entries = engine["totals"], engine["entries"]
    assert totals["entries"] == len(entries) > 0
    assert 0 < totals["bytes"] <= totals["max_bytes"]
    assert totals["misses"] == sum(totals["misses_by_reason"].values()) > 0
    assert set(totals["misses_by_reason"]) == REASONS
    assert totals["integrity_errors"] == 0
    assert {"system", "turn"} <= {entry["kind"] for entry in entries} <= {"system", "turn", "prompt", "answer"}
    turns = [entry["num_tokens"] for entry in entries if entry["kind"] == "turn"]
    assert any(0 < stored.usage.prompt_tokens - num_tokens <= GENERATION_PROMPT for num_tokens in turns)
    assert all(entry["where"] == "memory" and not entry["pinned"] for entry in entries)
    miss = miss_of(http, changed)
    assert miss["reason"] == "text"
    assert f"the text differs at token {miss['num_common']}: ' red baker" in miss["explanation"]
    assert "instead of ' blue baker" in miss["explanation"]


def test_clearing_the_cache_removes_all_entries_and_explains_the_next_miss(client: openai.OpenAI, http: httpx.Client):
    messages = conversation(f"You are {somebody()}, a baker from Oakdale.")
    first = [ask(client, messages), ask(client, messages)][-1]
    assert num_cached(first) > 0
    before = engine_cache(http)["totals"]
    body = http.delete("/v1/cache").json()
    assert body["cleared"] == {"entries": before["entries"], "bytes": before["bytes"], "files": 0}
    assert [engine["entries"] for engine in body["engines"]] == [before["entries"]]
    assert body["missing"] == []
    after = engine_cache(http)
    assert (after["entries"], after["totals"]["entries"], after["totals"]["bytes"]) == ([], 0, 0)
    second = ask(client, messages)
    assert (num_cached(second), content(second)) == (0, content(first))
    assert miss_of(http, second)["reason"] == "cleared"
    assert "it was cleared" in miss_of(http, second)["explanation"]
    assert num_cached(ask(client, messages)) > 0


def test_same_image_is_served_from_the_cache_and_another_image_is_a_miss(client: openai.OpenAI, http: httpx.Client):
    size = 136  # of pictures that no other test sends
    square, circle = (image_part(shape(*what, size)) for what in (("blue", "square"), ("green", "circle")))
    question = "What is in the image?"
    first, second = ask(client, about(question, square)), ask(client, about(question, square))
    assert num_cached(first) == 0
    assert num_cached(second) > 0
    assert content(second) == content(first)
    assert "blue square" in content(first)
    other = ask(client, about(question, circle))
    assert num_cached(other) == 0
    assert "green circle" in content(other)
    miss = miss_of(http, other)
    assert miss["reason"] == "image"
    assert f"the images differ at token {miss['num_common']}" in miss["explanation"]


@pytest.mark.night("hostile rows go through the whole graph in tests/golden")
def test_unsupported_method_on_the_cache_is_a_405_in_the_openai_error_format(http: httpx.Client):
    answer = http.post("/v1/cache")
    assert answer.status_code == 405
    assert "POST /v1/cache" in answer.json()["error"]["message"]


@pytest.mark.parametrize("salt", ["", "a\nb", "x" * 129])
@pytest.mark.night("hostile rows go through the whole graph in tests/golden")
def test_invalid_cache_salt_is_refused_by_name(client: openai.OpenAI, salt: str):
    with pytest.raises(openai.BadRequestError) as refused:
        salted(client, conversation("Be brief."), salt)
    assert refused.value.param == "cache_salt"
