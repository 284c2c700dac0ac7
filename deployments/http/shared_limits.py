"""SharedLimits: the limits of each API key over all ingresses of a cluster."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from deployments.http.api_keys import KeyIdentity
from deployments.http.errors import ErrorDialect
from deployments.http.rate_limits import RateLimited, RateLimits
from engine.protocol import InvalidRequest

log = logging.getLogger("ray.serve")

ASK_TIMEOUT_S = 0.5
"""Longest wait for the home of a key."""

SILENT_S = 5.0
"""Time in which a home without an answer is not asked again."""

LOST_S = 30.0
"""Time without a message after which the choices of an ingress that no longer runs have ended."""


class Peers(Protocol):
    """The ingresses of the cluster."""

    @property
    def node_id(self) -> str:
        """Node of this ingress."""
        ...

    @property
    def replica_id(self) -> str:
        """Unique id of this ingress."""
        ...

    def home_of(self, key: int) -> str:
        """Return the node whose ingress counts for all, for a 64-bit key."""
        ...

    def is_running(self, replica_id: str) -> bool:
        """Tell whether an ingress runs, as far as this one knows."""
        ...

    async def ask(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        """Call a method of the ingress on another node."""
        ...


@dataclass
class Use:
    """What a request uses.

    Attributes:
        num_tokens: Tokens of its prompt and its answer, to be set before its end.
    """

    num_tokens: int = 0


@dataclass(frozen=True)
class Entry:
    """The home's answer to a request that begins."""

    levels: dict[str, float]
    """What is left of each limit per minute."""
    refusal: RateLimited | InvalidRequest | None = None


class SharedLimits:
    """Counts the use of API keys with limits; other keys are not limited.

    Each key has a home, the ingress that rendezvous hashing gives it. The others ask it once per request, and tell it
    the end; what is left per minute they keep as of its last answer. When nodes come or go, a key with a new home
    begins there with a whole minute's allowance. While a home is silent, each ingress counts by itself.

    Args:
        peers: The ingresses; None: there is only this one.
        clock: Monotonic seconds.
        now: Seconds since the epoch, for dates in headers.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ):
        self._peers = peers
        self._clock = clock
        self._counts = RateLimits(clock, now)
        self._silent_until: dict[str, float] = {}  # by node
        self._keys: dict[str, KeyIdentity] = {}  # of choices that other ingresses have in flight here
        self._choices: dict[str, Counter[str]] = {}  # ingress -> key -> choices in flight
        self._heard_s: dict[str, float] = {}  # ingress -> time of its last message
        self._ends = set[asyncio.Task[None]]()

    def follow(self, identities: Iterable[KeyIdentity]) -> None:
        """Apply the limits of keys that have been read again."""
        self._counts.follow(identities)

    def check(self, key: KeyIdentity, num_choices: int) -> None:
        """Refuse a request that is known to exceed a limit, without counting it. Raises what `enter` raises."""
        self._counts.check(key, num_choices)

    def headers(self, key: KeyIdentity, dialect: ErrorDialect) -> dict[str, str]:
        """Return the rate limit headers of a dialect; {} for a key without limits per minute."""
        return self._counts.headers(key, dialect)

    @asynccontextmanager
    async def enter(self, key: KeyIdentity, num_choices: int) -> AsyncIterator[Use]:
        """Count a request, and its choices as in flight until the context exits.

        Raises:
            RateLimited: A limit of the key is reached; the request is not counted.
            InvalidRequest: More choices than the key may have in flight.
        """
        use, home = Use(), self._home(key)
        if home is not None:
            entry = await self._ask(home, "enter_limits", key, num_choices)
            if entry is None:
                home = None
            else:
                self._counts.set_levels(key, entry.levels)
                if entry.refusal is not None:
                    raise entry.refusal
        if home is None:
            self._counts.begin(key, num_choices)
        try:
            yield use
        finally:
            if home is None:
                self._counts.end(key, num_choices, use.num_tokens)
            else:
                telling = asyncio.ensure_future(self._tell_end(home, key, num_choices, use.num_tokens))
                self._ends.add(telling)
                telling.add_done_callback(self._ends.discard)

    def enter_for(self, replica_id: str, key: KeyIdentity, num_choices: int) -> Entry:
        """Count a request of another ingress."""
        self._end_lost()
        self._heard_s[replica_id] = self._clock()
        try:
            self._counts.begin(key, num_choices)
        except (RateLimited, InvalidRequest) as refusal:
            return Entry(self._counts.levels(key), refusal)
        self._keys[key.name] = key
        self._choices.setdefault(replica_id, Counter())[key.name] += num_choices
        return Entry(self._counts.levels(key))

    def leave_for(self, replica_id: str, key: KeyIdentity, num_choices: int, num_tokens: int) -> None:
        """End a request of another ingress. One that has been given up as lost only counts its tokens."""
        self._heard_s[replica_id] = self._clock()
        choices = self._choices.setdefault(replica_id, Counter())
        num_choices = min(num_choices, choices[key.name])
        choices[key.name] -= num_choices
        self._counts.end(key, num_choices, num_tokens)

    def _home(self, key: KeyIdentity) -> str | None:
        """Return the node of the key's home; None if this ingress counts."""
        if self._peers is None or not key.limits:
            return None
        home = self._peers.home_of(int.from_bytes(blake2b(key.name.encode(), digest_size=8).digest()))
        is_here = home == self._peers.node_id or self._silent_until.get(home, 0.0) > self._clock()
        return None if is_here else home

    async def _ask(self, home: str, method: str, *args: Any) -> Any:
        """Ask the home of a key; None if it does not answer."""
        assert self._peers is not None
        try:
            return await self._peers.ask(home, ASK_TIMEOUT_S, method, self._peers.replica_id, *args)
        except Exception as error:
            log.warning("node %s does not count the use of API keys, this ingress does: %r", home, error)
            self._silent_until[home] = self._clock() + SILENT_S
            return None

    async def _tell_end(self, home: str, *args: Any) -> None:
        await self._ask(home, "leave_limits", *args)

    def _end_lost(self) -> None:
        """End the choices of ingresses that no longer run."""
        for replica_id, heard_s in list(self._heard_s.items()):
            if self._clock() - heard_s < LOST_S or self._peers is None or self._peers.is_running(replica_id):
                continue
            for name, num_choices in self._choices.pop(replica_id, Counter()).items():
                self._counts.end(self._keys[name], num_choices, 0)
            del self._heard_s[replica_id]
