"""Random importances of prompts' tokens, and what plans keep of them."""

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from engine.core.spec_prefill.plan import KEPT_CHUNK_TOKENS

KEEPS = st.integers(10, 100).map(lambda percent: Fraction(percent, 100))
LENGTHS = st.one_of(st.integers(1, 3 * KEPT_CHUNK_TOKENS + 1), st.integers(1, 1500))
NOT_FINITE = [np.nan, np.inf, -np.inf]


@st.composite
def importances(draw: st.DrawFn) -> np.ndarray:
    """float32 [1..1500]: smooth, all alike, or of few values, so that chunks tie; some with what is no number."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(LENGTHS)
    values = draw(
        st.sampled_from(
            [
                rng.random(length),
                rng.integers(0, 2, -(-length // KEPT_CHUNK_TOKENS)).repeat(KEPT_CHUNK_TOKENS)[:length],
                np.zeros(length),
                np.full(length, 0.1),
                rng.standard_normal(length) * 1e30,
            ]
        )
    ).astype(np.float32)
    places = rng.random(length) < draw(st.sampled_from([0, 0, 0.05, 1]))
    values[places] = rng.choice(NOT_FINITE, places.sum())
    return values
