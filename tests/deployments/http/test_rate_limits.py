"""Limits of API keys: per minute, at once, and in the headers of all dialects."""

import pytest

from deployments.http.allowance import duration
from deployments.http.anthropic.dialect import ANTHROPIC
from deployments.http.api_keys import KeyIdentity, KeyLimits
from deployments.http.dialect import Dialect
from deployments.http.dialects import DIALECTS
from deployments.http.openai.dialect import OPENAI
from deployments.http.rate_limits import KINDS, RateLimited, RateLimits
from engine.errors import InvalidRequest
from tests.support.clock import Clock

FREE = KeyIdentity("free")


def key(name: str = "ann", **limits: int) -> KeyIdentity:
    return KeyIdentity(name, limits=KeyLimits(**limits))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> RateLimits:
    return RateLimits(clock, now=lambda: clock() + 1_800_000_000 - 100)  # 2027-01-15T08:00:00Z at first


def send(limits: RateLimits, key: KeyIdentity, num_choices: int = 1, num_tokens: int = 0) -> None:
    limits.begin(key, num_choices)
    limits.end(key, num_choices, num_tokens)


def refusal(limits: RateLimits, key: KeyIdentity, num_choices: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as error:
        send(limits, key, num_choices)
    return error.value


def test_request_beyond_the_limit_is_refused_with_the_time_to_wait(limits: RateLimits, clock: Clock):
    ann = key(max_requests_per_minute=3)
    for _ in range(3):
        send(limits, ann)
    error = refusal(limits, ann)
    assert error.wait_s == pytest.approx(20)
    for part in ("'ann'", "3", "max_requests_per_minute", "20 s"):
        assert part in error.message
    clock.advance(error.wait_s)
    send(limits, ann)
    assert refusal(limits, ann).wait_s == pytest.approx(20)


def test_a_refused_request_is_not_counted(limits: RateLimits, clock: Clock):
    ann = key(max_requests_per_minute=1)
    send(limits, ann)
    for _ in range(100):
        refusal(limits, ann)
    clock.advance(60)
    send(limits, ann)


def test_an_allowance_never_grows_beyond_that_of_a_minute(limits: RateLimits, clock: Clock):
    ann = key(max_requests_per_minute=2)
    clock.advance(3600)
    send(limits, ann)
    send(limits, ann)
    refusal(limits, ann)


def test_tokens_are_charged_when_the_answer_ends_and_may_overdraw_the_allowance(limits: RateLimits, clock: Clock):
    ann = key(max_tokens_per_minute=600)
    send(limits, ann, num_tokens=599)
    send(limits, ann, num_tokens=601)
    error = refusal(limits, ann)
    assert error.wait_s == pytest.approx(60.1), "600 tokens too many, and one to start with"
    assert "max_tokens_per_minute" in error.message and "600" in error.message
    clock.advance(error.wait_s)
    send(limits, ann)


def test_choices_in_flight_are_limited_until_they_end(limits: RateLimits):
    ann = key(max_rows=3)
    limits.begin(ann, 2)
    error = refusal(limits, ann, 2)
    assert "2 choices are in flight, and 2 more were requested" in error.message and "max_rows" in error.message
    assert 1 <= error.wait_s <= 60
    send(limits, ann, 1)
    limits.end(ann, 2, 0)
    send(limits, ann, 3)


def test_more_choices_than_max_rows_of_the_key_are_an_invalid_request(limits: RateLimits):
    with pytest.raises(InvalidRequest, match=r"`n` is 4: the API key 'ann' may have 3 .*max_rows") as error:
        send(limits, key(max_rows=3), 4)
    assert error.value.field == "n" and not isinstance(error.value, RateLimited)


def test_request_refused_by_a_limit_is_not_counted_against_other_limits(limits: RateLimits, clock: Clock):
    ann = key(max_requests_per_minute=2, max_rows=1, max_tokens_per_minute=60)
    limits.begin(ann, 1)
    refusal(limits, ann)
    limits.end(ann, 1, 120)
    refusal(limits, ann)
    clock.advance(61)
    send(limits, ann)
    assert limits.headers(ann, OPENAI)["x-ratelimit-remaining-requests"] == "1"


def test_check_of_the_limits_counts_no_request(limits: RateLimits):
    ann = key(max_requests_per_minute=1, max_rows=1)
    for _ in range(5):
        limits.check(ann, 1)
    send(limits, ann)
    with pytest.raises(RateLimited):
        limits.check(ann, 1)


def test_each_key_has_its_own_allowance(limits: RateLimits):
    ann, bob = key(max_requests_per_minute=1), key("bob", max_requests_per_minute=1)
    send(limits, ann)
    send(limits, bob)
    refusal(limits, ann)


def test_key_without_limits_has_no_headers_and_no_recorded_use(limits: RateLimits):
    for i in range(100):
        send(limits, KeyIdentity(f"{i}"), 1000)
        send(limits, FREE, num_tokens=10**9)
    assert limits.headers(FREE, OPENAI) == limits.headers(FREE, ANTHROPIC) == {}
    assert limits._uses == {}


# --- headers ---------------------------------------------------------------------------------------------------------


def test_openai_headers_show_limits_remaining_allowance_and_reset_times(limits: RateLimits):
    ann = key(max_requests_per_minute=10, max_tokens_per_minute=600)
    send(limits, ann, num_tokens=61)
    assert limits.headers(ann, OPENAI) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "539",
        "x-ratelimit-reset-tokens": "6.1s",
    }


def test_anthropic_headers_show_limits_remaining_allowance_and_reset_times(limits: RateLimits):
    ann = key(max_requests_per_minute=10, max_tokens_per_minute=600)
    send(limits, ann, num_tokens=1200)
    assert limits.headers(ann, ANTHROPIC) == {
        "anthropic-ratelimit-requests-limit": "10",
        "anthropic-ratelimit-requests-remaining": "9",
        "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:06Z",
        "anthropic-ratelimit-tokens-limit": "600",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2027-01-15T08:02:00Z",
    }


@pytest.mark.parametrize("dialect", tuple(DIALECTS), ids=lambda dialect: dialect.name)
def test_headers_show_only_the_limits_of_the_key(limits: RateLimits, dialect: Dialect):
    assert limits.headers(key(max_rows=2), dialect) == {}
    told = limits.headers(key("bob", max_tokens_per_minute=5), dialect)
    assert (
        len(told) == 3
        and all("tokens" in name for name in told)
        and set(told) < set(DIALECTS.limit_header_names(KINDS))
    )


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (3725.5, "62m5.5s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, written: str):
    assert duration(seconds) == written
