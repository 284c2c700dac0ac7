"""`/v1/cache` over several engines, and the sentence for each reason of a miss."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.cache import MAX_QUOTED_CHARS, cache_body, cleared_body, explanation
from deployments.requests import EngineAnswer, SilentEngine
from engine.cache_miss import CacheMiss, CacheMissReason
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.status import CacheCleared, CacheEntryStatus, CacheStatus

TOKENIZER = ChatTokenizer(DEMO_MODEL)
SPELL = TOKENIZER.token_bytes
ENTRY = CacheEntryStatus("system", 38, 4096, 3, pinned=True, tenant="ab12", where="both", age_s=9.5, idle_s=0.5)


def ids(text: str) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in TOKENIZER.encode_text(text))


def miss(reason: CacheMissReason, **fields: Any) -> CacheMiss:
    of_a_system_part = {"num_prompt_tokens": 40, "num_common": 12, "boundary": "system", "boundary_tokens": 38}
    return CacheMiss("chatcmpl-1", reason, **{**of_a_system_part, **fields})


COLD = CacheMiss("chatcmpl-0", "cold", 40)
LOST = {"num_common": 38}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (COLD, "no snapshot matches the start of this prompt of 40 tokens"),
        (
            miss("evicted", **LOST),
            "a snapshot at a system boundary covered 38 of 40 tokens, but it was evicted to free memory",
        ),
        (
            miss("cleared", **LOST, boundary="turn"),
            "a snapshot at a turn boundary covered 38 of 40 tokens, but it was cleared",
        ),
        (
            miss("tenant", **LOST),
            "a snapshot at a system boundary covered 38 of 40 tokens, "
            "but it belongs to another tenant (cache_salt or API key)",
        ),
        (
            miss("image"),
            "the first 12 of 40 tokens match a snapshot at a system boundary (38 tokens); "
            "the images differ at token 12",
        ),
        (
            miss("tools"),
            "the first 12 of 40 tokens match a snapshot at a system boundary (38 tokens); the tools differ",
        ),
        (
            miss("template_kwargs"),
            "the first 12 of 40 tokens match a snapshot at a system boundary (38 tokens); "
            "the chat_template_kwargs differ",
        ),
        (
            miss("text", prompt_token_ids=ids("blue"), stored_token_ids=ids(" red")),
            "the first 12 of 40 tokens match a snapshot at a system boundary (38 tokens); "
            "the text differs at token 12: 'blue' instead of ' red'",
        ),
        (
            miss("text", num_cached=10, boundary="turn", prompt_token_ids=ids("blue"), stored_token_ids=ids(" red")),
            "10 of 40 tokens were cached; the first 12 of 40 tokens match a snapshot at a turn boundary (38 tokens); "
            "the text differs at token 12: 'blue' instead of ' red'",
        ),
        (
            miss("text", num_prompt_tokens=12, stored_token_ids=ids(" red")),
            "the first 12 of 12 tokens match a snapshot at a system boundary (38 tokens); "
            "the prompt ends there, and the snapshot continues with ' red'",
        ),
    ],
    ids=lambda value: value.reason if isinstance(value, CacheMiss) else "",
)
def test_each_reason_of_a_cache_miss_has_its_explanation(found: CacheMiss, sentence: str):
    assert explanation(found, SPELL) == sentence


def text_miss(ours: tuple[int, ...], theirs: tuple[int, ...] = ()) -> str:
    return explanation(miss("text", prompt_token_ids=ours, stored_token_ids=theirs), SPELL)


def test_control_characters_and_control_tokens_are_quoted_as_harmless_text():
    assert r"'a\n\x1b[2J' instead of '<|im_end|>'" in text_miss(ids("a\n\x1b[2J"), ids("<|im_end|>"))
    assert r"'\u202ex' instead of" in text_miss(ids("\u202ex")), "what turns the direction of text"


def test_half_a_character_is_shown_as_a_replacement_character():
    first_half = ids("🙂")[:1]
    assert len(ids("🙂")) > 1, "this tokenizer spells it in several tokens"
    assert "'�' instead of 'x'" in text_miss(first_half, ids("x"))


def test_ids_outside_the_vocabulary_are_shown_as_empty_text():
    assert "'x' instead of ''" in text_miss(ids("x"), (4096, 2**31 - 1))


def test_explanation_of_a_miss_quotes_only_a_few_tokens():
    words = ids(" red blue green yellow" * 5)
    shown = TOKENIZER.detokenizer(()).push(words[:8])
    assert f"{shown!r} instead of ''" in text_miss(words)
    endless = explanation(miss("text", prompt_token_ids=(7,)), lambda token_id: b"x" * 999)
    assert f"'{'x' * MAX_QUOTED_CHARS}…' instead of ''" in endless


@given(st.lists(st.integers(0, 5000), max_size=12), st.lists(st.integers(0, 5000), max_size=12))
def test_explanation_of_a_miss_is_one_line_of_json_for_any_tokens(ours: list[int], theirs: list[int]):
    sentence = text_miss(tuple(ours), tuple(theirs))
    assert sentence.isprintable()
    assert json.loads(json.dumps(sentence)) == sentence


STATUSES = (
    CacheStatus(
        max_bytes=1000,
        num_bytes=100,
        num_entries=2,
        num_pinned=1,
        num_hits=3,
        num_misses=4,
        num_cached_tokens=5,
        num_stored=6,
        num_evicted=7,
        num_rejected=8,
        num_unusable=10,
        num_integrity_errors=9,
        misses={"cold": 3, "text": 1},
        entries=(ENTRY,),
        recent_misses=(COLD,),
        disk={"num_files": 2},
    ),
    CacheStatus(max_bytes=10, num_bytes=1, num_entries=1, num_misses=2, misses={"text": 2}),
    CacheStatus(off_reason="prefix_cache.enabled is false"),
)


def answers(*said: Any) -> list[EngineAnswer[Any]]:
    return [EngineAnswer(f"node-{i}", f"replica-{i}", answer) for i, answer in enumerate(said)]


def test_cache_figures_of_all_engines_are_added_up():
    totals = cache_body(answers(*STATUSES), [], SPELL)["totals"]
    by_reason = totals.pop("misses_by_reason")
    assert totals == {
        "bytes": 101,
        "max_bytes": 1010,
        "entries": 3,
        "pinned": 1,
        "hits": 3,
        "misses": 6,
        "cached_tokens": 5,
        "stored": 6,
        "evicted": 7,
        "rejected": 8,
        "unusable": 10,
        "integrity_errors": 9,
    }
    assert by_reason == {**dict.fromkeys(get_args(CacheMissReason), 0), "cold": 3, "text": 3}


def test_each_engine_shows_its_own_figures_entries_and_explained_misses():
    full, small, off = cache_body(answers(*STATUSES), [], SPELL)["engines"]
    assert (full["node_id"], full["replica_id"], full["off"]) == ("node-0", "replica-0", None)
    assert (full["totals"]["bytes"], small["totals"]["bytes"], off["totals"]["bytes"]) == (100, 1, 0)
    assert full["entries"] == [
        {
            "kind": "system",
            "num_tokens": 38,
            "num_bytes": 4096,
            "num_hits": 3,
            "pinned": True,
            "tenant": "ab12",
            "where": "both",
            "age_s": 9.5,
            "idle_s": 0.5,
        }
    ]
    (shown,) = full["recent_misses"]
    assert (shown["request_id"], shown["reason"], shown["num_common"]) == ("chatcmpl-0", "cold", 0)
    assert shown["explanation"] == explanation(COLD, SPELL)
    assert (full["disk"], small["disk"]) == ({"num_files": 2}, None)
    assert (off["off"], off["entries"]) == ("prefix_cache.enabled is false", [])


def test_silent_engine_is_listed_as_missing():
    silent = [SilentEngine("node-9:1", "no answer within 10 s")]
    named = [{"node_id": "node-9", "engine_id": "node-9:1", "reason": "no answer within 10 s"}]
    assert cache_body([], silent, SPELL)["missing"] == named
    assert cleared_body([], silent)["missing"] == named
    assert cache_body([], silent, SPELL)["totals"]["bytes"] == 0
    assert cache_body(answers(*STATUSES), [], SPELL)["missing"] == []


def test_cleared_entries_are_added_up_and_listed_per_engine():
    body = cleared_body(answers(CacheCleared(3, 100, 2), CacheCleared(1, 10)), [])
    assert body["cleared"] == {"entries": 4, "bytes": 110, "files": 2}
    assert body["engines"] == [
        {"node_id": "node-0", "engine_id": "node-0", "replica_id": "replica-0", "entries": 3, "bytes": 100, "files": 2},
        {"node_id": "node-1", "engine_id": "node-1", "replica_id": "replica-1", "entries": 1, "bytes": 10, "files": 0},
    ]
    assert cleared_body([], [])["cleared"] == {"entries": 0, "bytes": 0, "files": 0}


def test_bodies_of_the_cache_page_are_valid_json():
    for body in (cache_body(answers(*STATUSES), [], SPELL), cleared_body(answers(CacheCleared(1, 2, 3)), [])):
        json.dumps(body, allow_nan=False)
