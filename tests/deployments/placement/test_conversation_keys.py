"""Keys of conversations: what a later turn shares with an earlier one, and what it must not share with others."""

import json
from typing import Any

import pytest

from deployments.http.parsed_request import ReadingRules
from deployments.http.request_reader import read_request
from deployments.placement.conversation_keys import (
    BYTES_PER_TOKEN,
    IMAGE_BYTES,
    MAX_TURN_KEYS,
    session_of,
    sketch_conversation,
    sketch_raw,
)
from deployments.requests import ChatRequest

SYSTEM = {"role": "system", "content": "You are terse."}
FIRST = {"role": "user", "content": "What is 12 + 30?"}
ANSWER = {"role": "assistant", "content": "42"}
SECOND = {"role": "user", "content": "And twice that?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
RULES = ReadingRules("demo", frozenset({"image"}))


def test_a_turn_contains_the_key_of_the_turn_before_it():
    before, after = sketch_conversation([SYSTEM, FIRST]), sketch_conversation([SYSTEM, FIRST, ANSWER, SECOND])
    assert before.keys.turns[0] in after.keys.turns[1:]
    assert before.keys.system == after.keys.system and before.keys.conversation == after.keys.conversation
    assert before.num_bytes < after.num_bytes


@pytest.mark.parametrize(
    "other",
    [
        [SYSTEM, {**FIRST, "content": "What is 12 + 31?"}],
        [{**SYSTEM, "content": "You are verbose."}, FIRST],
        [FIRST],
        [SYSTEM, FIRST, ANSWER, {**SECOND, "content": "And half of it?"}],
    ],
)
def test_another_conversation_has_another_key_for_its_whole_prompt(other: list[dict[str, Any]]):
    keys = {sketch_conversation(messages).keys.turns[0] for messages in (other, [SYSTEM, FIRST, ANSWER, SECOND])}
    assert len(keys) == 2


def test_conversations_with_the_same_system_part_share_its_key_alone():
    one, other = sketch_conversation([SYSTEM, FIRST], [TOOL]).keys, sketch_conversation([SYSTEM, SECOND], [TOOL]).keys
    assert one.system == other.system and one.conversation != other.conversation
    assert sketch_conversation([SYSTEM, FIRST]).keys.system != one.system, "tools are in front of the conversation"


def test_the_order_of_the_fields_of_a_message_does_not_matter():
    turned = {"content": FIRST["content"], "role": "user"}
    assert sketch_conversation([FIRST]) == sketch_conversation([turned])


def test_the_longest_prefixes_of_a_long_conversation_have_keys():
    messages = [SYSTEM, *[{**FIRST, "content": f"turn {i}"} for i in range(100)]]
    keys = sketch_conversation(messages).keys
    assert len(keys.turns) == MAX_TURN_KEYS
    assert keys.turns[1:] == sketch_conversation(messages[:-1]).keys.turns[:-1]


def test_an_image_counts_by_its_url_for_the_key_and_a_little_for_the_size():
    def asked(url: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    small, large = (sketch_conversation([asked("data:" + "a" * size)]) for size in (10, 10_000_000))
    assert small.keys.turns != large.keys.turns
    assert small.num_bytes == large.num_bytes and IMAGE_BYTES < large.num_bytes < 2 * IMAGE_BYTES


def test_tenants_share_no_key_and_sessions_share_prefixes_but_not_the_conversation():
    sketch = sketch_conversation([SYSTEM, FIRST])
    plain, other = sketch.scoped("", "").keys, sketch.scoped("team", "").keys
    assert not {plain.system, plain.conversation, *plain.turns} & {other.system, other.conversation, *other.turns}
    one, two = sketch.scoped("team", "a").keys, sketch.scoped("team", "b").keys
    assert one.conversation != two.conversation != other.conversation
    assert (one.system, one.turns) == (two.system, two.turns) == (other.system, other.turns)


def test_half_a_character_has_a_key_like_any_text():
    half = "\ud83d"
    message = {
        "role": "user",
        "content": [{"type": "text", "text": half}, {"type": "image_url", "image_url": {"url": half}}],
    }
    sketches = [sketch_conversation([message], [{"name": half}]), sketch_raw(half)]
    assert all(sketch.scoped(half, half).keys != sketch.keys for sketch in sketches)


def test_a_raw_prompt_that_goes_on_keeps_its_conversation():
    text = "Once upon a time. " * 200
    assert sketch_raw(text).keys.conversation == sketch_raw(text + "And then").keys.conversation
    assert sketch_raw(text).keys.turns != sketch_raw(text + "And then").keys.turns
    ids = list(range(5000))
    assert sketch_raw(ids).keys.conversation == sketch_raw([*ids, 7]).keys.conversation
    assert sketch_raw(ids).num_bytes == 5000 * BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, ""),
        ({"x-claude-code-session-id": "s"}, "s"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s\na"),
        ({"session-id": "s", "thread-id": "t"}, "s\nt"),
        ({"thread-id": "t"}, "t"),
        ({"x-session-affinity": "ses", "x-session-id": "other"}, "ses"),
        ({"x-session-id": "x" * 10_000}, "x" * 256),
    ],
)
def test_session_is_read_from_the_headers_of_agents(headers: dict[str, str], session: str):
    assert session_of(headers) == session


def read(kind: str, body: dict[str, Any]) -> ChatRequest:
    return read_request(json.dumps({"model": "demo", "max_tokens": 9, **body}).encode(), kind, RULES).request


def test_the_same_conversation_has_the_same_keys_in_every_dialect():
    turns = [FIRST, ANSWER, SECOND]
    items = [{"type": "message", **turn} for turn in turns]
    asked = [
        read("chat", {"messages": [SYSTEM, *turns]}),
        read("messages", {"messages": turns, "system": SYSTEM["content"]}),
        read("responses", {"input": items, "instructions": SYSTEM["content"], "max_tokens": None}),
    ]
    assert len({request.keys for request in asked}) == 1 and asked[0].keys is not None


def test_prompt_cache_key_names_the_session():
    body = {"messages": [FIRST], "prompt_cache_key": "mine"}
    assert read("chat", body).session == "mine"
    assert read("chat", {**body, "prompt_cache_key": None}).session == ""
