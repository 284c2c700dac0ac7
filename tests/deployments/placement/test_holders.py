"""From where a node may fetch a prefix, and what that makes its quote."""

import pytest

from deployments.placement.holders import MIN_TOKENS, prefix_holder, with_fetches
from engine.placement import CachedSnapshot, PrefixHolder, Quote

ADDRESSES = {"a": "10.0.0.1:7", "b": "10.0.0.2:7", "c": "10.0.0.3:7", "alone": ""}
GB = 10**9


def holding(num_tokens: int, **more) -> Quote:
    snapshot = CachedSnapshot(f"digest of {num_tokens}", num_tokens, num_tokens * 10**5)
    return Quote(cached_tokens=num_tokens, snapshot=snapshot, fetch_bytes_per_s=GB, **more)


EMPTY = Quote(prefill_s=100.0, fetch_bytes_per_s=GB)


def test_the_holder_is_the_node_with_the_longest_prefix():
    quotes = {"a": EMPTY, "b": holding(5000), "c": holding(9000)}
    assert prefix_holder("a", quotes, ADDRESSES) == PrefixHolder("10.0.0.3:7", "digest of 9000", 9000)
    assert prefix_holder("b", quotes, ADDRESSES) == PrefixHolder("10.0.0.3:7", "digest of 9000", 9000)
    assert prefix_holder("c", quotes, ADDRESSES) is None


def test_a_node_that_refuses_the_request_still_gives_its_prefix():
    quotes = {"a": EMPTY, "b": holding(5000, refusal="draining")}
    assert prefix_holder("a", quotes, ADDRESSES) == PrefixHolder("10.0.0.2:7", "digest of 5000", 5000)


@pytest.mark.parametrize(
    "quotes",
    [
        {"a": EMPTY, "b": None},
        {"a": EMPTY, "b": Quote()},
        {"a": EMPTY, "alone": holding(5000)},
        {"a": holding(5000 - MIN_TOKENS + 1), "b": holding(5000)},
        {"a": None, "b": holding(5000)},
        {"a": EMPTY},
    ],
)
def test_there_is_no_holder_without_a_longer_prefix_at_a_node_that_shares(quotes):
    assert prefix_holder("a", quotes, ADDRESSES) is None


def test_a_node_that_shares_no_snapshots_fetches_none():
    assert prefix_holder("alone", {"alone": EMPTY, "b": holding(5000)}, ADDRESSES) is None


def test_the_seconds_are_those_of_the_transfer_and_of_the_rest():
    quotes = with_fetches({"a": EMPTY, "b": holding(9000, prefill_s=1.0)}, ADDRESSES, 10_000)
    a, b = quotes["a"], quotes["b"]
    assert a is not None and b is not None
    assert a.prefill_s == pytest.approx(0.9 + 100.0 * 0.19), "0.9 GB, and a fifth of the attention"
    assert b.prefill_s == 1.0


def test_what_is_cached_already_is_not_transferred():
    here = Quote(prefill_s=100.0, cached_tokens=4500, fetch_bytes_per_s=GB)
    quote = with_fetches({"a": here, "b": holding(9000)}, ADDRESSES, 9000)["a"]
    assert quote is not None and quote.prefill_s == pytest.approx(0.45)


def test_a_slow_transfer_changes_nothing():
    slow = Quote(prefill_s=5.0, fetch_bytes_per_s=10**6)
    assert with_fetches({"a": slow, "b": holding(9000)}, ADDRESSES, 10_000)["a"] == slow


def test_estimates_that_are_too_short_give_no_negative_seconds():
    quote = with_fetches({"a": EMPTY, "b": holding(9000)}, ADDRESSES, 10)["a"]
    assert quote is not None and 0 < quote.prefill_s <= 100.0
