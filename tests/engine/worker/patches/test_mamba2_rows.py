"""Rows of Mamba-2 layers return to the state after any verified token, and padding leaves the states as they are."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.worker import patches
from engine.worker.burst import BurstPrefill
from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from engine.worker.patches import mamba2_rows
from engine.worker.recurrent_layer import BatchRecurrentLayer
from engine.worker.rewind import rewind_unsupported_reason
from tests.support.families import FAMILIES
from tests.support.zoo import new_module

NUM_VERIFIED = 5
MIXERS = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2")
every_mixer = pytest.mark.parametrize("family", MIXERS)


def language_model(family: str) -> LanguageModel:
    patches.install(decodes=True)
    mx.random.seed(3)
    return LanguageModel(new_module(FAMILIES[family].config).language_model)


def rows(lm: LanguageModel, lengths: tuple[int, ...]) -> BatchCache:
    """Return a decode group of prompts of these lengths."""
    caches = [lm.make_cache() for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        token_ids = mx.arange(3, 3 + length)[None]
        lm.extend(token_ids, None, cache, np.broadcast_to(np.arange(length, dtype=np.int32), (3, 1, length)))
    group = BatchCache.of(caches[0], as_offset=True)
    group.join(caches[1:])
    return group


def states(group: BatchCache) -> list[np.ndarray]:
    recurrent = [layer for layer in group.layers if isinstance(layer, BatchRecurrentLayer)]
    return [np.array(slot) for layer in recurrent for slot in layer.slots]


@pytest.mark.parametrize(("family", "limit"), [*((family, None) for family in MIXERS), ("mamba2", (0.01, 0.02))])
def test_rows_return_to_the_states_after_any_tokens_of_a_verified_forward(family, limit):
    """Each of three rows keeps another number of the tokens. limit: smallest and largest step, if not the family's."""
    lm, lengths = language_model(family), (3, 11, 6)
    for _, module in lm.lm.named_modules() if limit else ():
        if type(module) in mamba2_rows.LIBRARY:
            module.time_step_limit = limit
    start = mx.array(lengths, mx.int32)
    token_ids = mx.array(np.random.default_rng(0).integers(3, 60, (len(lengths), NUM_VERIFIED)))
    logits, after = [], []
    stepped = rows(lm, lengths)
    for i in range(NUM_VERIFIED):
        layers = stepped.at(start + i, 32)
        logits.append(np.array(lm.decode(token_ids[:, i : i + 1], layers, (start + i)[:, None])[0]))
        after.append(states(stepped))
    for num_kept in ((1, 3, 5), (4, 1, 2), (5, 5, 5), (2, 4, 1)):
        verified = rows(lm, lengths)
        layers = verified.at(start, 32, record=True)
        found, _ = lm.decode(token_ids, layers, start[:, None] + mx.arange(NUM_VERIFIED))
        verified.commit(mx.array(num_kept, mx.int32))
        np.testing.assert_allclose(np.array(found), np.concatenate(logits, axis=1), rtol=1e-4, atol=1e-5)
        for i, slot in enumerate(states(verified)):
            for row, kept in enumerate(num_kept):
                expected = after[kept - 1][i][row]
                np.testing.assert_allclose(slot[row], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@every_mixer
def test_library_still_overwrites_its_states(family, monkeypatch: pytest.MonkeyPatch):
    """If it does not, the patch can go once padding is skipped too."""
    lm = language_model(family)
    assert rewind_unsupported_reason(lm) is None
    for mixer, (convolve, update) in mamba2_rows.LIBRARY.items():
        monkeypatch.setattr(mixer, "_conv", convolve)
        monkeypatch.setattr(mixer, "_ssm", update)
    assert rewind_unsupported_reason(lm) is not None


@every_mixer
def test_library_still_does_not_skip_padding(family, monkeypatch: pytest.MonkeyPatch):
    lm = language_model(family)
    assert BurstPrefill(lm, None).skips_padding
    for mixer, (_, update) in mamba2_rows.LIBRARY.items():
        monkeypatch.setattr(mixer, "_ssm", update)
    assert not BurstPrefill(lm, None).skips_padding
