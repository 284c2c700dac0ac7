"""Penalties, biases and minimum lengths against a plain numpy reference, position by position."""

from dataclasses import replace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.row import Row
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.logprobs import logprobs_of
from engine.worker.processors import LogitsProcessors, apply_grammar_masks

VOCAB = 40
STOPS = (3, 5)


def row(name: str, prompt: list[int], output: list[int], **params: object) -> Row:
    spec = EngineRequest(name, np.array(prompt, np.int32), SamplingParams(64, 0.0, **params), STOPS)  # type: ignore[arg-type]
    return Row(spec, output_token_ids=list(output))


def expected(logits: np.ndarray, request: Row, drafts: list[int]) -> np.ndarray:
    """logits [vocab] behind the row's output and these drafts, by the book."""
    p, output = request.sampling, [*request.output_token_ids, *drafts]
    result = logits.astype(np.float64).copy()
    for token in {*request.spec.token_ids.tolist(), *output}:
        result[token] = (
            result[token] / p.repetition_penalty if result[token] > 0 else result[token] * p.repetition_penalty
        )
    for token in output:
        result[token] -= p.frequency_penalty
    for token in set(output):
        result[token] -= p.presence_penalty
    for token, bias in p.logit_bias:
        result[token] += bias
    if len(output) < p.min_tokens:
        result[list(STOPS)] = -np.inf
    return result


tokens = st.integers(0, VOCAB - 1)
params = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.4]),
        "presence_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.lists(st.tuples(tokens, st.sampled_from([-100.0, 2.5])), max_size=3).map(tuple),
        "min_tokens": st.integers(1, 8),
    },
)
rows = st.lists(
    st.builds(
        lambda prompt, output, p: row("r", prompt, output, **p),
        st.lists(tokens, min_size=1, max_size=6),
        st.lists(tokens, min_size=1, max_size=6),
        params,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows,
    drafts=st.lists(st.lists(tokens, min_size=2, max_size=2), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_penalties_at_each_position_use_the_history_before_that_position(rows, drafts, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), 3, VOCAB)).astype(np.float32)
    fed = mx.array([[r.output_token_ids[-1], *d] for r, d in zip(rows, drafts, strict=False)])
    positions = mx.array([[len(r.output_token_ids) + i for i in range(3)] for r in rows])
    shaped = np.array(LogitsProcessors.of(rows, VOCAB)(mx.array(logits), fed, positions))
    for i, (r, d) in enumerate(zip(rows, drafts, strict=False)):
        for j in range(3):
            np.testing.assert_allclose(shaped[i, j], expected(logits[i, j], r, d[:j]), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=rows, others=rows, data=st.data())
def test_token_counts_after_joins_removals_and_commits_equal_counts_on_the_host(rows, others, data):
    joined = LogitsProcessors.of(rows, VOCAB).joined(LogitsProcessors.of(others, VOCAB))
    everyone = [*rows, *others]
    new = [data.draw(st.lists(tokens, min_size=3, max_size=3)) for _ in everyone]
    num_kept = [data.draw(st.integers(1, 3)) for _ in everyone]
    joined.commit(mx.array(new), mx.array(num_kept, mx.int32))
    stay = data.draw(st.permutations(range(len(everyone))).map(lambda order: order[: max(1, len(order) // 2)]))
    kept = joined.select(list(stay))
    logits = np.random.default_rng(0).normal(0, 3, (len(stay), 1, VOCAB)).astype(np.float32)
    after = [
        Row(everyone[i].spec, output_token_ids=[*everyone[i].output_token_ids, *new[i][: num_kept[i]]]) for i in stay
    ]
    positions = mx.array([[len(r.output_token_ids)] for r in after])
    shaped = np.array(kept(mx.array(logits), mx.zeros((len(stay), 1), mx.int32), positions))
    for i, r in enumerate(after):
        np.testing.assert_allclose(shaped[i, 0], expected(logits[i, 0], r, []), rtol=1e-5, atol=1e-5)


def test_tokens_of_a_prompt_without_a_logit_are_not_counted():
    logits = np.random.default_rng(0).normal(0, 3, (2, 1, VOCAB)).astype(np.float32)
    asking = [row("with", [1, VOCAB + 3, VOCAB], [2], repetition_penalty=2.0), row("r", [1], [2], presence_penalty=1.0)]
    shaped = np.array(LogitsProcessors.of(asking, VOCAB)(mx.array(logits), mx.array([[2], [2]]), mx.array([[1], [1]])))
    without = [row("without", [1], [2], repetition_penalty=2.0), asking[1]]
    for i, one in enumerate(without):
        np.testing.assert_allclose(shaped[i, 0], expected(logits[i, 0], one, []), rtol=1e-5, atol=1e-5)


def test_the_input_logits_are_not_modified():
    logits = mx.array(np.random.default_rng(0).normal(size=(1, 1, VOCAB)).astype(np.float32))
    before = np.array(logits)
    asking = row("r", [1], [2], logit_bias=((7, 50.0),), presence_penalty=1.0, min_tokens=9, logprobs=2)
    shaped = LogitsProcessors.of([asking], VOCAB)(logits, mx.array([[2]]), mx.array([[1]]))
    mx.eval(shaped)
    assert np.array_equal(np.array(logits), before) and not np.array_equal(np.array(shaped), before)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_those_of_the_model(num_top):
    logits = np.random.default_rng(3).normal(0, 3, (3, 2, VOCAB)).astype(np.float32)
    chosen = np.array([[1, 2], [3, 4], [5, 6]])
    asking = [row("a", [1], [], logprobs=num_top), row("b", [1], []), row("c", [1], [], logprobs=2)]
    found = logprobs_of(asking, mx.array(logits), mx.array(chosen))
    assert found is not None
    read = found.read([2, 1, 1])
    assert set(read) == {0, 2} and [len(read[0]), len(read[2])] == [2, 1]
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for i, n in ((0, num_top), (2, 2)):
        for j, entry in enumerate(read[i]):
            best = np.argsort(-log_softmax[i, j])[:n]
            assert [token for token, _ in entry.top] == best.tolist()
            np.testing.assert_allclose([p for _, p in entry.top], log_softmax[i, j][best], rtol=1e-5)
            np.testing.assert_allclose(entry.logprob, log_softmax[i, j][chosen[i, j]], rtol=1e-5)
    assert logprobs_of([asking[1]], mx.array(logits[:1]), mx.array(chosen[:1])) is None


class Only:
    """A grammar that allows these tokens, one set per position."""

    def __init__(self, *allowed: set[int], fails: bool = False):
        self.allowed, self.fails = allowed, fails

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        if self.fails:
            raise ValueError("broken")
        bits = np.zeros((len(self.allowed), 64), np.uint8)
        for i, ids in enumerate(self.allowed):
            bits[i, list(ids)] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def advance(self, token_ids: tuple[int, ...]) -> None: ...

    def fork(self) -> "Only":
        return self


class Permissive:
    """Allows every token, as a thought does."""

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        return np.full((len(draft) + 1, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)


def test_masks_that_allow_every_token_leave_the_logits_untouched():
    requests = [row("a", [1], []), row("b", [1], [])]
    requests[0].matcher = Permissive()  # type: ignore[assignment]
    logits = mx.zeros((2, 3, VOCAB), mx.bfloat16)
    shaped, errors = apply_grammar_masks(requests, logits, [[8, 8]] * 2)
    assert shaped is logits and not errors


def test_masks_apply_to_their_own_rows_and_a_broken_matcher_fails_only_its_row():
    requests = [row("free", [1], []), row("masked", [1], []), row("broken", [1], [])]
    requests[1].matcher, requests[2].matcher = Only({1, 33}, {39}), Only(fails=True)
    masked, errors = apply_grammar_masks(requests, mx.zeros((3, 3, VOCAB)), [[8, 8]] * 3)
    shaped = np.array(masked)
    assert np.isfinite(shaped[[0, 2]]).all()
    assert [np.flatnonzero(np.isfinite(shaped[1, i])).tolist() for i in range(2)] == [[1, 33], [39]]
    assert np.isfinite(shaped[1, 2]).all(), "behind a forbidden draft nothing is masked"
    assert errors == {2: "the grammar's matcher failed: broken"}


def test_an_unused_processor_gives_the_very_same_logits():
    logits = mx.zeros((1, 1, VOCAB))
    plain = replace(row("r", [1], [2]).spec, request_id="plain")
    assert LogitsProcessors.of([Row(plain)], VOCAB)(logits, mx.array([[2]]), mx.array([[1]])) is logits
