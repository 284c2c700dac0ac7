"""A conversation of a few thousand tokens, end to end: what the benchmark of long contexts does with 200,000."""

import asyncio

import pytest

from tests.benchmarks.long_context import CONTEXT, make_model, measure

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")


def test_a_long_conversation_stays_within_the_books_and_its_next_turn_hits_the_cache(tmp_path):
    figures = asyncio.run(measure(make_model(tmp_path), 3000, 200, 4))
    assert 2500 < figures.num_tokens < CONTEXT
    assert figures.num_tokens - 64 < figures.num_cached < figures.num_tokens
    assert 0 < figures.peak_bytes <= figures.booked_bytes
