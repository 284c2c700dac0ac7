"""HttpFigures: what an ingress has answered, as plain numbers for its metrics."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

NO_KEY_NAME = "none"
"""Stands for the name of the API key on a server without keys."""

ALL_KEYS = "all"
"""Stands for all names of API keys where they are hidden."""

LIMITS = (
    "max_queue",
    "queue_timeout_s",
    "max_share_per_address",
    "max_unread_bodies",
    "max_unread_bytes",
    "max_body_bytes",
    "min_body_bytes_per_s",
    "max_context_tokens",
    "memory",
    "image_memory_mb",
    "compile_timeout_s",
    "max_requests_per_minute",
    "max_tokens_per_minute",
    "max_rows",
)
"""Limits that requests can exceed. Each has a count from the start, so that a first refusal is a rise from 0."""


@dataclass
class KeyUsage:
    """The usage in all complete answers to the requests of one API key."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    """Cached tokens are included."""
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def add(self, other: "KeyUsage") -> None:
        """Add another usage to this one."""
        self.num_answers += other.num_answers
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_completion_tokens += other.num_completion_tokens


@dataclass
class HttpFigures:
    """Counters of one ingress since its start. Their size is bounded by the routes, error codes and API keys."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Responses by API (see http/response_counter.py) and status. A stream has the status with which it began."""
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Errors by status and code or type, in responses and in streams that had begun."""
    refusals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(LIMITS, 0)))
    """Requests that exceeded a limit, by the name of the limit."""
    usage: dict[str, KeyUsage] = field(default_factory=dict)
    """By name of the API key."""

    def answered(self, key_name: str, usage: KeyUsage) -> None:
        """Count a complete answer, at the moment at which its usage is put into it."""
        self.usage.setdefault(key_name or NO_KEY_NAME, KeyUsage()).add(usage)

    def failed(self, status: int, code: str, limit: str) -> None:
        """Count an error that is sent to a client. limit: the name of the limit that the request exceeded, or ''."""
        self.errors[status, code] += 1
        if limit:
            self.refusals[limit] += 1

    def without_names(self) -> "HttpFigures":
        """Return figures with the usage of all keys as one; unchanged on a server without keys."""
        if set(self.usage) <= {NO_KEY_NAME}:
            return self
        total = KeyUsage()
        for usage in self.usage.values():
            total.add(usage)
        return HttpFigures(self.responses, self.errors, self.refusals, {ALL_KEYS: total})

    def status(self, shows_names: bool) -> dict[str, Any]:
        """Return errors, refusals and usage for `/v1/status`. shows_names: whether it may name the API keys."""
        usage = self.usage if shows_names else self.without_names().usage
        return {
            "errors": {f"{status} {code}": num for (status, code), num in self.errors.items()},
            "refusals": {limit: num for limit, num in self.refusals.items() if num},
            "keys": {name: asdict(used) for name, used in usage.items()},
        }
