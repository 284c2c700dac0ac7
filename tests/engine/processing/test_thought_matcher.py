"""Thoughts under masks: free, then closed, then the grammar; drafts are judged as tokens one by one are."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.processing.thought_matcher import ThoughtMatcher, ThoughtRules
from engine.protocol import GrammarSpec, ThoughtSpec
from tests.engine.processing.walks import STOPS, VOCAB_SIZE, allowed, compiled, decode, encode, json_schema

END = 9
CLOSING = encode("\n</think>\n\n")
RESUME = CLOSING[CLOSING.index(END) + 1 :]
JSON = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def matcher(grammar: GrammarSpec | None = JSON, budget: int | None = None, opening: str = "") -> ThoughtMatcher:
    spec = ThoughtSpec(END, CLOSING, budget, encode(opening) if opening else ())
    inner = None if grammar is None else compiled(grammar)
    return ThoughtMatcher(ThoughtRules(spec, STOPS, VOCAB_SIZE, inner is not None), inner)  # type: ignore[arg-type]


def forced(at: ThoughtMatcher) -> str:
    """Return the text that is forced from here on."""
    at, text = at.fork(), ""
    while len(choices := allowed(at.masks()[0])) == 1:
        text += decode((choices[0],))
        at.advance((choices[0],))
    return text


def test_a_thought_before_a_grammar_may_contain_any_token_but_the_stop_tokens():
    assert set(range(VOCAB_SIZE)) - set(allowed(matcher().masks()[0])) == set(STOPS)
    assert len(allowed(matcher(grammar=None, budget=9).masks()[0])) == VOCAB_SIZE


def test_a_thought_ended_by_the_model_is_followed_by_the_text_of_the_template():
    thinking = matcher()
    thinking.advance((*encode("Let me see"), END))

    assert forced(thinking).startswith("\n\n")
    thinking.advance(RESUME)
    assert np.array_equal(thinking.masks(), compiled(JSON).masks())


def test_tokens_after_a_thought_ended_by_the_model_are_free_without_a_grammar():
    thinking = matcher(grammar=None, budget=9)
    thinking.advance((*encode("Hm"), END))

    assert len(allowed(thinking.masks()[0])) == VOCAB_SIZE


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_is_closed_after_its_budget(budget: int):
    thinking = matcher(budget=budget)
    for _ in range(budget):
        assert len(allowed(thinking.masks()[0])) > 1
        thinking.advance(encode("x"))

    assert forced(thinking).startswith("\n</think>\n\n")


def test_a_thought_that_the_prompt_does_not_open_is_opened_first():
    assert forced(matcher(budget=3, opening="<think>\n")) == "<think>\n"
    assert forced(matcher(budget=0, opening="<think>\n")).startswith("<think>\n\n</think>\n\n")


def test_a_stop_token_ends_the_answer_in_every_state():
    for text in ((), (*encode("x"),), (*encode("x"), END)):
        at = matcher(grammar=None, budget=5)
        at.advance((*text, STOPS[0]))
        assert allowed(at.masks()[0]) == sorted(STOPS)
        at.advance(encode("more"))


def test_a_forbidden_token_is_an_error():
    with pytest.raises(ValueError, match="forced"):
        matcher(budget=0).advance(encode("x"))


def wander(start: ThoughtMatcher, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Allowed tokens, ends of the thought often among them."""
    at, token_ids = start.fork(), []
    for _ in range(num_tokens):
        choices = allowed(at.masks()[0])
        token_id = END if END in choices and rng.random() < 0.3 else rng.choice(choices)
        token_ids.append(token_id)
        at.advance((token_id,))
    return tuple(token_ids)


def one_by_one(at: ThoughtMatcher, draft: tuple[int, ...]) -> list[np.ndarray]:
    at, rows = at.fork(), []
    for token_id in (*draft, None):
        rows.append(at.masks()[0])
        if token_id is None or token_id not in allowed(rows[-1]):
            return rows
        at.advance((token_id,))
    return rows


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    budget=st.none() | st.integers(0, 6),
    has_grammar=st.booleans(),
    opening=st.sampled_from(["", "<think>\n"]),
    num_before=st.integers(0, 12),
    num_draft=st.integers(0, 12),
    breaks=st.booleans(),
)
def test_masks_after_a_draft_equal_those_after_its_single_tokens(
    seed: int, budget: int | None, has_grammar: bool, opening: str, num_before: int, num_draft: int, breaks: bool
):
    if not has_grammar and budget is None:
        budget = 3
    rng = random.Random(seed)
    start = matcher(JSON if has_grammar else None, budget, opening)
    walked = wander(start, rng, num_before + num_draft)
    start.advance(walked[:num_before])
    draft = list(walked[num_before:])
    if breaks and draft:
        draft[rng.randrange(len(draft))] = rng.randrange(VOCAB_SIZE)
    before = start.masks()

    masks = start.masks(tuple(draft))

    assert np.array_equal(masks, np.stack(one_by_one(start, tuple(draft))))
    assert np.array_equal(start.masks(), before)


def test_forks_advance_independently_of_each_other():
    first = matcher(budget=4)
    first.advance(encode("x"))
    second = first.fork()
    first.advance((END, *RESUME))

    assert len(allowed(second.masks()[0])) > 1 and END in allowed(second.masks()[0])
    assert np.array_equal(first.masks(), compiled(JSON).masks())
    third = first.fork()
    third.advance(encode("{"))
    assert np.array_equal(first.masks(), compiled(JSON).masks())
