"""SharedLimits: the limits of each API key over all ingresses of a cluster."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from deployments.http.api_keys import KeyIdentity
from deployments.http.dialect import Dialect
from deployments.http.rate_limits import RateLimited, RateLimits
from engine.errors import InvalidRequest

log = logging.getLogger("ray.serve")

ASK_TIMEOUT_S = 0.5
"""Longest wait for the home of a key."""

SILENT_S = 5.0
"""Time in which a home without an answer is not asked again."""

LOST_S = 30.0
"""Time without a message after which the choices of an ingress that no longer runs have ended."""

END_TRIES, END_PAUSE_S, MAX_END_PAUSE_S = 20, 1.0, 30.0
"""How often the end of a request is told to a home that does not answer, and the pauses, each twice the one before."""

MAX_ENDED = 4096
"""Requests that are remembered as ended, because their end has overtaken their beginning."""


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


class Request(NamedTuple):
    """A request of another ingress that is counted here."""

    key: KeyIdentity
    num_choices: int


@dataclass(frozen=True)
class Entry:
    """The home's answer to a request that begins."""

    levels: dict[str, float]
    """What is left of each limit per minute."""
    refusal: RateLimited | InvalidRequest | None = None


class SharedLimits:
    """Counts the use of API keys with limits; other keys are not limited.

    Each key has a home, the ingress that rendezvous hashing gives it. The others ask it once per request, and tell it
    the end until it confirms that; the rest of the minute's allowance they know from its last answer. When nodes come
    or go, a key with a new home begins there with a whole minute's allowance. While a home is silent, each ingress
    counts by itself.

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
        self._requests: dict[str, dict[str, Request]] = {}  # of other ingresses, counted here: ingress -> id
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._heard_s: dict[str, float] = {}  # ingress -> time of its last message
        self._ends = set[asyncio.Task[None]]()

    def follow(self, identities: Iterable[KeyIdentity]) -> None:
        """Apply the limits of keys that have been read again."""
        self._counts.follow(identities)

    def check(self, key: KeyIdentity, num_choices: int) -> None:
        """Refuse a request that is known to exceed a limit, without counting it. Raises what `enter` raises."""
        self._counts.check(key, num_choices)

    def headers(self, key: KeyIdentity, dialect: Dialect) -> dict[str, str]:
        """Return the rate limit headers of a dialect; {} for a key without limits per minute."""
        return self._counts.headers(key, dialect)

    @asynccontextmanager
    async def enter(self, key: KeyIdentity, num_choices: int) -> AsyncIterator[Use]:
        """Count a request, and its choices as in flight until the context exits.

        Raises:
            RateLimited: A limit of the key is reached; the request is not counted.
            InvalidRequest: More choices than the key may have in flight.
        """
        use, home, id = Use(), self._home(key), secrets.token_hex(16)
        if home is not None:
            entry = await self._ask(home, "enter_limits", id, key, num_choices)
            if entry is None:  # it may have been counted there nevertheless
                self._tell_end(home, id, key, 0)
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
                self._tell_end(home, id, key, use.num_tokens)

    def enter_for(self, replica_id: str, id: str, key: KeyIdentity, num_choices: int) -> Entry:
        """Count a request of another ingress; id: unique."""
        self._end_lost()
        self._heard_s[replica_id] = self._clock()
        try:
            self._counts.begin(key, num_choices)
        except (RateLimited, InvalidRequest) as refusal:
            return Entry(self._counts.levels(key), refusal)
        if id in self._ended:
            self._counts.end(key, num_choices, 0)
        else:
            self._requests.setdefault(replica_id, {})[id] = Request(key, num_choices)
        return Entry(self._counts.levels(key))

    def leave_for(self, replica_id: str, id: str, key: KeyIdentity, num_tokens: int) -> None:
        """End a request of another ingress. The tokens of one that is not counted any more, or not yet, count."""
        self._heard_s[replica_id] = self._clock()
        if id in self._ended:
            return
        self._ended.append(id)
        found = self._requests.get(replica_id, {}).pop(id, None)
        self._counts.end(key, 0 if found is None else found.num_choices, num_tokens)

    def _home(self, key: KeyIdentity) -> str | None:
        """Return the node of the key's home; None if this ingress counts."""
        if self._peers is None or not key.limits:
            return None
        home = self._peers.home_of(_hash(key))
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

    def _tell_end(self, home: str, id: str, key: KeyIdentity, num_tokens: int) -> None:
        """Tell the home of a key the end of a request in the background, until it has confirmed that."""
        telling = asyncio.ensure_future(self._until_told(home, id, key, num_tokens))
        self._ends.add(telling)
        telling.add_done_callback(self._ends.discard)

    async def _until_told(self, home: str, id: str, key: KeyIdentity, num_tokens: int) -> None:
        assert self._peers is not None
        pause_s = END_PAUSE_S
        for _ in range(END_TRIES):
            try:
                await self._peers.ask(home, ASK_TIMEOUT_S, "leave_limits", self._peers.replica_id, id, key, num_tokens)
                return
            except Exception as error:
                if self._peers.home_of(_hash(key)) != home:
                    return  # it runs no longer, or counts no longer
                log.info("node %s has not confirmed the end of a request of an API key: %r", home, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_END_PAUSE_S)
        log.warning("node %s was not told the end of a request of the API key %r", home, key.name)

    def _end_lost(self) -> None:
        """End the choices of ingresses that no longer run."""
        for replica_id, heard_s in list(self._heard_s.items()):
            if self._clock() - heard_s < LOST_S or self._peers is None or self._peers.is_running(replica_id):
                continue
            for key, num_choices in self._requests.pop(replica_id, {}).values():
                self._counts.end(key, num_choices, 0)
            del self._heard_s[replica_id]


def _hash(key: KeyIdentity) -> int:
    return int.from_bytes(blake2b(key.name.encode(), digest_size=8).digest())
