"""RateLimits: limits of each API key per minute and at once, as one ingress counts them; see shared_limits.py."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

from deployments.http.allowance import Allowance
from deployments.http.api_keys import KeyIdentity, KeyLimits
from deployments.http.dialect import Dialect
from deployments.http.errors import Refusal
from deployments.http.in_flight import Pace
from engine.errors import InvalidRequest

Clock = Callable[[], float]

MINUTE_S = 60.0

ROUNDING = 1e-6
"""Tolerance in requests or tokens, so that a retry after exactly the announced time succeeds."""

KINDS = ("requests", "tokens")


class RateLimited(Refusal):
    """A limit of the API key is reached.

    Args:
        key: Name of the key.
        limit: Name of the limit.
        value: The limit.
        found: The current use, as a clause.
        wait_s: Seconds until the request may succeed; may exceed Retry-After.
    """

    status, code, type = 429, "rate_limit_exceeded", "rate_limit_error"

    def __init__(self, key: str, limit: str, value: int, found: str, wait_s: float):
        super().__init__(key, limit, value, found, wait_s)
        self.wait_s = self.retry_after_s = wait_s

    @property
    def message(self) -> str:
        key, limit, value, found, wait_s = self.args
        return f"The API key {key!r} has a limit of {value} ({limit}): {found}. Try again in {math.ceil(wait_s)} s."


class TokenBucket:
    """A token bucket, which may be overdrawn.

    Args:
        per_minute: Capacity, and refill per minute.
        clock: Monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Clock):
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated_s = clock()

    @property
    def level(self) -> float:
        """Remaining requests or tokens; negative when overdrawn."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._updated_s) * self.per_minute / MINUTE_S)
        self._updated_s = now
        return self._level

    @property
    def has_one(self) -> bool:
        return self.level >= 1 - ROUNDING

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + ROUNDING))

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def continue_from(self, other: "TokenBucket") -> None:
        """Count as used what has been used of another bucket."""
        self.take(other.per_minute - other.level)

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * MINUTE_S / self.per_minute


class KeyUse:
    """The recent use of one key."""

    def __init__(self, key: KeyIdentity, clock: Clock):
        self._name = key.name
        self._clock = clock
        self._pace = Pace(clock)
        self._num_rows = 0
        self.buckets: dict[str, TokenBucket] = {}
        self.follow(key.limits)

    def follow(self, limits: KeyLimits) -> None:
        """Apply other limits. What is in flight and what has been used stay counted."""
        self._max_rows = limits.max_rows
        sizes = dict(zip(KINDS, (limits.max_requests_per_minute, limits.max_tokens_per_minute), strict=True))
        old, self.buckets = self.buckets, {}
        for kind, per_minute in sizes.items():
            if per_minute is None:
                continue
            bucket = self.buckets[kind] = TokenBucket(per_minute, self._clock)
            if (before := old.get(kind)) is not None:
                bucket.continue_from(before)

    def check(self, num_choices: int) -> None:
        """Check the limits without counting. Raises RateLimited, InvalidRequest for more choices than max_rows."""
        self._check_rows(num_choices)
        for kind, bucket in self.buckets.items():
            if not bucket.has_one:
                raise RateLimited(
                    self._name,
                    f"max_{kind}_per_minute",
                    bucket.per_minute,
                    f"no {kind} are left",
                    bucket.seconds_until(1),
                )

    def _check_rows(self, num_choices: int) -> None:
        if self._max_rows is None:
            return
        if num_choices > self._max_rows:
            raise InvalidRequest(
                f"`n` is {num_choices}: the API key {self._name!r} may have {self._max_rows} choices in flight "
                "(max_rows).",
                "n",
            )
        num_over = self._num_rows + num_choices - self._max_rows
        if num_over > 0:
            found = f"{self._num_rows} choices are in flight, and {num_choices} more were requested"
            wait_s = self._pace.seconds_until(num_over)
            raise RateLimited(self._name, "max_rows", self._max_rows, found, wait_s)

    def begin(self, num_choices: int) -> None:
        """Count a request and its choices in flight. Raises what `check` raises."""
        self.check(num_choices)
        if "requests" in self.buckets:
            self.buckets["requests"].take(1)
        if self._num_rows == 0:
            self._pace.begin()
        self._num_rows += num_choices

    def end(self, num_choices: int, num_tokens: int) -> None:
        """End choices in flight, and count tokens."""
        self._num_rows = max(0, self._num_rows - num_choices)  # a key that was lost meanwhile begins anew
        self._pace.ended(num_choices)
        if "tokens" in self.buckets:
            self.buckets["tokens"].take(num_tokens)


class RateLimits:
    """Counts the use of keys with limits; other keys are not limited. Its size is bounded by the number of keys.

    Requests and tokens per minute are token buckets: an idle key may use a minute's allowance at once, which refills
    evenly. A request needs one token to start, and all of its tokens count when its answer ends. That may overdraw the
    bucket, and the next request waits longer.

    Args:
        clock: Monotonic seconds.
        now: Seconds since the epoch, for dates in headers.
    """

    def __init__(self, clock: Clock = time.monotonic, now: Clock = time.time):
        self._clock = clock
        self._now = now
        self._uses: dict[str, KeyUse] = {}

    def follow(self, identities: Iterable[KeyIdentity]) -> None:
        """Apply the limits of keys that have been read again. Uses of unchanged limits stay, those of lost keys go."""
        current = {key.name: key for key in identities if key.limits}
        self._uses = {name: use for name, use in self._uses.items() if name in current}
        for name, use in self._uses.items():
            use.follow(current[name].limits)

    def check(self, key: KeyIdentity, num_choices: int) -> None:
        """Check the limits without counting. Raises what `enter` raises."""
        if key.limits:
            self._use(key).check(num_choices)

    def begin(self, key: KeyIdentity, num_choices: int) -> None:
        """Count a request, and its choices as in flight until `end`.

        Raises:
            RateLimited: A limit of the key is reached; the request is not counted.
            InvalidRequest: More choices than the key may have in flight.
        """
        if key.limits:
            self._use(key).begin(num_choices)

    def end(self, key: KeyIdentity, num_choices: int, num_tokens: int) -> None:
        """End the choices of a request, and count the prompt and completion tokens of its answer, complete or not."""
        if key.limits:
            self._use(key).end(num_choices, num_tokens)

    def levels(self, key: KeyIdentity) -> dict[str, float]:
        """Return what is left of each limit per minute, by its kind; negative when overdrawn."""
        return {kind: bucket.level for kind, bucket in self._use(key).buckets.items()} if key.limits else {}

    def set_levels(self, key: KeyIdentity, levels: Mapping[str, float]) -> None:
        """Take over what is left of each limit per minute, as another ingress has counted it."""
        for kind, bucket in self._use(key).buckets.items():
            bucket.take(bucket.level - levels.get(kind, bucket.level))

    def headers(self, key: KeyIdentity, dialect: Dialect) -> dict[str, str]:
        """Return the rate limit headers of a dialect; {} for a key without limits per minute."""
        if not key.limits:
            return {}
        headers: dict[str, str] = {}
        for kind, bucket in self._use(key).buckets.items():
            full_in_s = bucket.seconds_until(bucket.per_minute)
            headers |= dialect.limit_headers(
                Allowance(kind, bucket.per_minute, bucket.remaining, full_in_s, self._now())
            )
        return headers

    def _use(self, key: KeyIdentity) -> KeyUse:
        if key.name not in self._uses:
            self._uses[key.name] = KeyUse(key, self._clock)
        return self._uses[key.name]
