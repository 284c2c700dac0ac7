"""Sampling: filters keep what they should, seeds decide, and a row never depends on its neighbours."""

from dataclasses import replace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.core.runner import NO_TOKEN
from engine.errors import InvalidRequest
from engine.protocol import SamplingParams
from engine.worker.sampler import Sampler, mix_seeds, random_keys

VOCAB = 64


def logits_of(batch: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (batch, VOCAB)).astype(np.float32))


def sample(rows: list[SamplingParams], logits: mx.array, positions: np.ndarray) -> np.ndarray:
    """One token per row; logits [B, vocab], positions [B]."""
    sampler = Sampler(rows)
    noise = sampler.noise(mx.array(positions.astype(np.int32))[:, None], logits.shape[-1])
    return np.array(sampler(logits[:, None], noise))[:, 0]


def draw(logits: mx.array, params: SamplingParams, count: int) -> np.ndarray:
    """`count` samples of one row's logits, at output positions 0, 1, 2, ..."""
    rows = mx.broadcast_to(logits, (count, VOCAB))
    return sample([params] * count, rows, np.arange(count))


def test_temperature_zero_samples_the_most_likely_token():
    logits = logits_of(5)
    assert sample([SamplingParams(1, 0.0)] * 5, logits, np.zeros(5)).tolist() == mx.argmax(logits, -1).tolist()


def test_samples_follow_the_softmax_at_the_temperature():
    logits, count = logits_of(1), 20_000
    params = SamplingParams(1, temperature=1.5, seed=3)
    frequency = np.bincount(draw(logits, params, count), minlength=VOCAB) / count
    expected = np.array(mx.softmax(logits[0] / 1.5))
    assert np.abs(frequency - expected).max() < 4 * np.sqrt(0.25 / count)


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_p": 0.5}, lambda p: np.argsort(-p)[: 1 + int((np.cumsum(np.sort(p)[::-1]) < 0.5).sum())]),
        ({"min_p": 0.3}, lambda p: np.flatnonzero(p >= 0.3 * p.max())),
        ({"top_k": 10, "top_p": 0.4}, lambda p: _nucleus_of_the_best(p, 10, 0.4)),
        ({"top_p": 1e-9}, lambda p: [p.argmax()]),
        ({"min_p": 1.0}, lambda p: [p.argmax()]),
        ({"top_k": 1}, lambda p: [p.argmax()]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "allowed",
)
def test_filters_allow_exactly_the_tokens_of_their_definition(filters, allowed):
    logits = logits_of(1, seed=5)
    params = SamplingParams(1, temperature=1.3, seed=1, **filters)
    probs = np.array(mx.softmax(logits[0] / 1.3))
    assert set(draw(logits, params, 4000)) == set(allowed(probs))


def _nucleus_of_the_best(probs: np.ndarray, k: int, p: float) -> np.ndarray:
    best = np.argsort(-probs)[:k]
    share = np.cumsum(probs[best]) / probs[best].sum()
    return best[: 1 + int((share < p).sum())]


def test_a_row_gets_the_same_token_in_any_batch():
    logits = logits_of(6, seed=2)
    rows = [
        SamplingParams(1, 0.0),
        SamplingParams(1, 1.0, seed=5),
        SamplingParams(1, 1.0, seed=5, top_p=0.7),
        SamplingParams(1, 2.0, seed=6, top_k=5),
        SamplingParams(1, 0.7, seed=2**64 - 1, min_p=0.1),
        SamplingParams(1, 1.0, seed=0),
    ]
    positions = np.array([0, 3, 9, 1, 2**20, 0])
    together = sample(rows, logits, positions).tolist()
    alone = [sample([rows[i]], logits[i : i + 1], positions[i : i + 1]).item() for i in range(6)]
    assert together == alone
    order = [4, 1, 0, 5, 3, 2]
    shuffled = sample([rows[i] for i in order], logits[mx.array(order)], positions[order]).tolist()
    assert [together[i] for i in order] == shuffled


def test_each_seed_and_position_has_its_own_random_key():
    seeds = np.array([0, 0, 1, 1, 2**63, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 0, 1, 0, 0])
    keys = np.array(random_keys(mx.array(mix_seeds(seeds))[:, None], mx.array(positions)[:, None]))[:, 0]
    assert keys.dtype == np.uint32 and keys.shape == (6, 2)
    assert len({tuple(k) for k in keys.tolist()}) == 6
    logits = mx.zeros((1, VOCAB))
    assert len(set(draw(logits, SamplingParams(1, 1.0, seed=1), 200))) > VOCAB // 2


def test_rows_with_other_seeds_get_other_tokens_and_rows_with_one_seed_the_same():
    """As the choices of a request: each has a seed of its own."""
    seeds = [1, 2, 1, 2**64 - 1]
    rows = [SamplingParams(1, 1.0, seed=seed) for seed in seeds]
    logits, positions = mx.zeros((len(rows), VOCAB)), np.full(len(rows), 3)
    drawn = np.array([sample(rows, logits, positions + i).tolist() for i in range(40)])
    assert np.array_equal(drawn[:, 0], drawn[:, 2])
    for other in (1, 3):
        assert np.mean(drawn[:, 0] == drawn[:, other]) < 0.5
    assert np.mean(drawn[:, 1] == drawn[:, 3]) < 0.5


def test_keys_are_those_of_splitmix64_on_the_host():
    """Sebastiano Vigna's splitmix64.c with the mixed seed as its state, after `position + 1` calls."""
    seed, position, mask = 2**64 - 3, 11, 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    expected = mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & mask)
    mixed = mx.array(mix_seeds(np.array([seed], np.uint64)))[:, None]
    low, high = np.array(random_keys(mixed, mx.array([[position]]))).reshape(-1).tolist()
    assert low | high << 32 == expected


def test_positions_sampled_together_get_the_same_tokens_as_one_by_one():
    """Verification samples at once the tokens that plain decoding samples step by step."""
    rows = [SamplingParams(1, 1.0, seed=4, top_p=0.8), SamplingParams(1, 0.0), SamplingParams(1, 1.3, seed=9, top_k=7)]
    logits = mx.array(np.random.default_rng(1).normal(0, 2, (3, 4, VOCAB)).astype(np.float32))
    positions = mx.array([[5, 6, 7, 8], [0, 1, 2, 3], [9, 10, 11, 12]])
    sampler = Sampler(rows)
    together = np.array(sampler(logits, sampler.noise(positions, VOCAB)))
    for i in range(4):
        assert together[:, i].tolist() == sample(rows, logits[:, i], np.array(positions)[:, i]).tolist()


def test_bfloat16_logits_are_sampled_in_float32():
    """Noise in bfloat16 has so few values that many tokens would tie, and the first of them would win."""
    tokens = draw(mx.zeros((1, VOCAB), mx.bfloat16), SamplingParams(1, 1.0, seed=4), 4000)
    expected = draw(mx.zeros((1, VOCAB), mx.float32), SamplingParams(1, 1.0, seed=4), 4000)
    assert np.array_equal(tokens, expected)


def test_a_row_without_top_p_is_not_touched_by_a_neighbour_with_one():
    """Summed from the large end, float32 reaches 1 long before a flat tail of 250 000 tokens ends."""
    vocab = 248_320
    probs = np.full(vocab, 0.2 / (vocab - 1), np.float32)
    probs[0] = 0.8
    logits = mx.broadcast_to(mx.log(mx.array(probs))[None], (2, vocab))
    plain = SamplingParams(1, temperature=1.0, top_k=vocab, seed=1)
    for position in range(20, 30):
        at = np.array([position, position])
        together = sample([plain, SamplingParams(1, temperature=1.0, top_p=0.9, seed=2)], logits, at)
        alone = sample([replace(plain, top_k=0)], logits[:1], at[:1])
        assert together[0] == alone[0]


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-9, 1e-4])
def test_a_tiny_temperature_is_greedy_not_garbage(temperature):
    logits = logits_of(1) * 10
    assert set(draw(logits, SamplingParams(1, temperature=temperature), 20)) == {int(mx.argmax(logits).item())}  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_give_no_token_and_only_in_their_row(bad):
    logits = mx.concatenate([logits_of(1), mx.full((1, VOCAB), bad)])
    for temperature in (0.0, 1.0):
        params = SamplingParams(1, temperature, seed=3, top_k=5)
        tokens = sample([params, params], logits, np.zeros(2))
        assert tokens[0] >= 0 and tokens[1] == NO_TOKEN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", -1), ("seed", 2**64), ("top_k", 2**31), ("top_k", -1), ("temperature", float("nan"))),
        *(("temperature", -0.1), ("top_p", 1.1), ("min_p", float("inf")), ("max_tokens", 0)),
    ],
)
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})
