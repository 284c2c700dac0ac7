"""Sparse plans: what no score may leave out, and that no other plan is ever carried out."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.spec_prefill.plan import (
    CONTROL_FOLLOWERS,
    KEPT_CHUNK_TOKENS,
    TAIL_TOKENS,
    ScoreRequest,
    find_anchors,
    fingerprint,
    make_plan,
    select,
    why_unfit,
)
from engine.protocol import Boundary, SparsePlan
from tests.engine.core.spec_prefill.importances import KEEPS, importances


@st.composite
def score_requests(draw: st.DrawFn) -> tuple[ScoreRequest, np.ndarray]:
    importance, keep = draw(importances()), draw(KEEPS)
    num_tokens = len(importance)
    rng = np.random.default_rng(num_tokens)
    token_ids = rng.integers(0, 50, num_tokens).astype(np.int32)
    num_dense = draw(st.one_of(st.just(0), st.integers(0, num_tokens)))
    anchors = draw(st.lists(st.integers(num_dense, num_tokens - 1), max_size=9)) if num_dense < num_tokens else []
    anchors = np.array(sorted(set(anchors)), np.int32)
    return ScoreRequest("r", token_ids, num_dense, anchors, float(keep)), importance


@given(score_requests())
@settings(deadline=None, max_examples=60)
def test_a_plan_keeps_all_dense_and_anchor_tokens_and_fits_its_prompt(pair):
    request, importance = pair
    num_tokens, num_dense = len(request.token_ids), request.num_dense
    plan = make_plan(request, importance)
    positions = plan.positions.tolist()
    must = {*range(num_dense), *request.anchors.tolist(), num_tokens - 1}
    assert plan.positions.dtype == np.int32 and positions == sorted(set(positions)) and plan.num_dense == num_dense
    assert must <= set(positions)
    chosen = select(importance[num_dense:], request.keep) + num_dense
    assert set(positions) == must | set(chosen.tolist()), "nothing else"
    behind = num_tokens - num_dense
    num_kept = len(positions) - num_dense
    assert math.ceil(Fraction(str(request.keep)) * behind) <= num_kept
    assert num_kept < request.keep * behind + 2 * KEPT_CHUNK_TOKENS + len(request.anchors) + 1
    assert why_unfit(plan, request.token_ids) is None
    assert num_dense <= plan.num_contiguous <= len(positions)


@given(score_requests())
@settings(deadline=None, max_examples=60)
def test_equal_scores_give_equal_plans_and_scores_of_dense_tokens_are_ignored(pair):
    request, importance = pair
    plan, other = make_plan(request, importance), importance.copy()
    other[: request.num_dense] = 7
    again = make_plan(replace(request, request_id="again", tenant="other", anchors=request.anchors.copy()), other)
    assert np.array_equal(plan.positions, again.positions) and plan.fingerprint == again.fingerprint


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_anchors_are_control_tokens_with_followers_the_tail_of_the_last_turn_and_images(data):
    num_tokens = data.draw(st.integers(1, 400))
    token_ids = np.random.default_rng(num_tokens).integers(0, 60, num_tokens).astype(np.int32)
    control = data.draw(st.lists(st.integers(0, 70), max_size=4))
    places = st.integers(0, num_tokens)
    turns, systems = data.draw(st.lists(places, max_size=2)), data.draw(st.lists(places, max_size=1))
    media = np.array(sorted(data.draw(st.sets(st.integers(0, num_tokens - 1), max_size=9))), np.int32)
    boundaries = (*(Boundary("system", n) for n in systems), *(Boundary("turn", n) for n in turns))
    expected = set(media.tolist())
    for place, token_id in enumerate(token_ids):
        if token_id in control:
            expected |= set(range(place, min(place + CONTROL_FOLLOWERS + 1, num_tokens)))
    end = max(turns) if turns else num_tokens
    expected |= set(range(max(end - TAIL_TOKENS, 0), num_tokens))
    anchors = find_anchors(token_ids, control, boundaries, media)
    assert anchors.dtype == np.int32 and anchors.tolist() == sorted(expected)


def test_a_prompt_without_control_tokens_turns_or_images_has_its_end_as_anchors():
    anchors = find_anchors(np.zeros(1000, np.int32), (), (), np.empty(0, np.int32))
    assert anchors.tolist() == list(range(1000 - TAIL_TOKENS, 1000))


small_ints = st.lists(st.integers(0, 3), max_size=5)
said = st.tuples(small_ints, small_ints, st.integers(0, 3))


@given(said, said)
def test_fingerprints_are_equal_exactly_for_equal_plans_of_equal_prompts(one, other):
    digests = [
        fingerprint(np.array(tokens, np.int32), np.array(positions, np.int32), num_dense)
        for tokens, positions, num_dense in (one, other)
    ]
    assert (digests[0] == digests[1]) == (one == other)
    assert digests[0] == fingerprint(np.array([*one[0], 0], np.int32)[:-1], np.array(one[1], np.int64), one[2])


def _plan(request: ScoreRequest) -> SparsePlan:
    return make_plan(request, np.random.default_rng(1).random(len(request.token_ids)).astype(np.float32))


def _edited(plan: SparsePlan, token_ids: np.ndarray, positions: object, num_dense: int | None = None) -> SparsePlan:
    """With a fingerprint that fits: what is wrong must be seen by itself."""
    changed = np.array(positions, np.int32)
    dense = plan.num_dense if num_dense is None else num_dense
    return SparsePlan(changed, dense, fingerprint(token_ids, changed, dense))


def _gap(plan: SparsePlan) -> int:
    return plan.num_contiguous


Corruption = Callable[[SparsePlan, np.ndarray], tuple[SparsePlan, np.ndarray]]

CORRUPTIONS: dict[str, tuple[str, Corruption]] = {
    "another type": ("int64", lambda p, ids: (replace(p, positions=p.positions.astype(np.int64)), ids)),
    "two axes": ("shape", lambda p, ids: (_edited(p, ids, [p.positions]), ids)),
    "nothing": ("k > 0", lambda p, ids: (_edited(p, ids, [], 0), ids)),
    "a number": ("shape", lambda p, ids: (replace(p, positions=np.array(5, np.int32)), ids)),
    "the last token is missing": ("last token", lambda p, ids: (_edited(p, ids, p.positions[:-1]), ids)),
    "a token behind the end": ("last token", lambda p, ids: (_edited(p, ids, [*p.positions, len(ids)]), ids)),
    "below zero": ("range from -1", lambda p, ids: (_edited(p, ids, [-1, *p.positions], 0), ids)),
    "one twice": ("ascending", lambda p, ids: (_edited(p, ids, [*p.positions[:-1], *p.positions[-2:]]), ids)),
    "two in the wrong order": (
        "ascending",
        lambda p, ids: (_edited(p, ids, [*p.positions[:-3], *p.positions[[-2, -3, -1]]]), ids),
    ),
    "far behind the end": ("ascending", lambda p, ids: (_edited(p, ids, [0, 2**31 - 1, len(ids) - 1], 0), ids)),
    "differences that overflow": (
        "ascending",
        lambda p, ids: (_edited(p, ids, [5, 3 - 2**31, -1, len(ids) - 1], 0), ids),
    ),
    "more are dense than kept": ("keeps the first", lambda p, ids: (_edited(p, ids, p.positions, len(ids) + 1), ids)),
    "a gap among the dense": ("keeps the first", lambda p, ids: (_edited(p, ids, p.positions, _gap(p) + 1), ids)),
    "fewer than none are dense": ("keeps the first", lambda p, ids: (_edited(p, ids, p.positions, -1), ids)),
    "fewer are dense than it was made for": (
        "fingerprints differ",
        lambda p, ids: (replace(p, num_dense=p.num_dense - 1), ids),
    ),
    "one more is kept": (
        "fingerprints differ",
        lambda p, ids: (replace(p, positions=np.insert(p.positions, _gap(p), _gap(p))), ids),
    ),
    "one less is kept": ("fingerprints differ", lambda p, ids: (replace(p, positions=np.delete(p.positions, -2)), ids)),
    "no fingerprint": ("fingerprints differ", lambda p, ids: (replace(p, fingerprint=""), ids)),
    "in capitals": ("fingerprints differ", lambda p, ids: (replace(p, fingerprint=p.fingerprint.upper()), ids)),
    "a token that is kept is another one": ("fingerprints differ", lambda p, ids: (p, _with(ids, 0))),
    "a token that is left out is another one": ("fingerprints differ", lambda p, ids: (p, _with(ids, _gap(p)))),
    "a longer prompt": ("last token", lambda p, ids: (p, np.append(ids, ids[-1]))),
    "a shorter prompt": ("last token", lambda p, ids: (p, ids[:-1])),
    "one more token in the middle": ("last token", lambda p, ids: (p, np.insert(ids, _gap(p), 5))),
}


def _with(token_ids: np.ndarray, place: int) -> np.ndarray:
    changed = token_ids.copy()
    changed[place] += 1
    return changed


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("num_dense", [3, 40])
def test_a_plan_that_was_changed_or_is_another_prompts_is_refused_with_the_reason(name, num_dense):
    token_ids = np.random.default_rng(0).integers(0, 500, 700).astype(np.int32)
    plan = _plan(ScoreRequest("r", token_ids, num_dense, np.array([650], np.int32), 0.3))
    assert why_unfit(plan, token_ids) is None and num_dense <= _gap(plan) < len(plan.positions)
    reason, corrupt = CORRUPTIONS[name]
    assert reason in (why_unfit(*corrupt(plan, token_ids)) or "it is accepted")


@given(score_requests(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_plan_with_any_single_change_is_refused(pair, data):
    request, importance = pair
    plan, token_ids = make_plan(request, importance), request.token_ids
    place = data.draw(st.integers(0, len(token_ids) - 1))
    assert why_unfit(plan, _with(token_ids, place)) is not None
    index = data.draw(st.integers(0, len(plan.positions) - 1))
    moved = plan.positions.copy()
    moved[index] += data.draw(st.sampled_from([-1, 1, 2**20]))
    assert why_unfit(replace(plan, positions=moved), token_ids) is not None
