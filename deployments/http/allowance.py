"""Allowance: the rest of a limit of an API key, and the headers that tell it in most dialects."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """The rest of one limit per minute of an API key."""

    kind: str
    """requests or tokens"""
    per_minute: int
    remaining: int
    full_in_s: float
    """Seconds until all of it is there again."""
    now_s: float
    """Seconds since the epoch."""


def limit_headers(allowance: Allowance) -> dict[str, str]:
    """Return the headers of OpenAI's dialect."""
    kind = allowance.kind
    return {
        f"x-ratelimit-limit-{kind}": str(allowance.per_minute),
        f"x-ratelimit-remaining-{kind}": str(allowance.remaining),
        f"x-ratelimit-reset-{kind}": duration(allowance.full_in_s),
    }


def duration(seconds: float) -> str:
    """Format seconds as OpenAI does (Go durations): 0s, 120ms, 8.64s, 6m0s."""
    num_ms = math.ceil(round(seconds * 1000, 3))
    if 0 < num_ms < 1000:
        return f"{num_ms}ms"
    minutes, rest_ms = divmod(num_ms, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{rest_ms / 1000:g}s"
