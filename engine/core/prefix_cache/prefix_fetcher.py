"""PrefixFetcher: fetches the prefix of a prompt from the node that holds it, where computing is predicted to be slower.

Fetched files join the disk tier, from which the prompt then continues as if they had always been there: a transfer that
fails is a miss.
"""

import logging
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass

from engine.core.cost_model import CostModel
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.placement import PrefixHolder
from engine.snapshot_store.snapshot_client import Fetch, SnapshotClient

log = logging.getLogger("orchard.engine")

FETCH_TIMEOUT_S = 5.0
"""Shortest time limit of a fetch, in seconds."""

FETCH_TIMEOUT_FACTOR = 4.0
"""A prompt waits for at most this many times the predicted seconds, and no longer than computing takes."""

MEASURE_AGAIN_S = 300.0
"""A node that was too slow for so many seconds is tried again."""


@dataclass(slots=True, eq=False)
class Fetching:
    """A prefix that is being fetched."""

    fetch: Fetch
    began_s: float
    """Monotonic seconds."""
    until_s: float
    """When waiting for it ends; monotonic seconds."""


class PrefixFetcher:
    """Starts, follows and ends fetches. Only `is_over` waits for the network.

    Args:
        client: Transfers files into the disk tier.
        adopt: Adds the snapshot of a file that has arrived, by its digest, and its ancestors to the cache.
        costs: Predicts the seconds of computing, and learns those of transfers.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        client: SnapshotClient,
        adopt: Callable[[str], None],
        costs: CostModel,
        clock: Callable[[], float],
    ):
        self._client = client
        self._adopt = adopt
        self._costs = costs
        self._clock = clock
        self._measured_s: dict[str, float] = {}  # by address; monotonic seconds

    def start(self, key: PromptKey, holder: PrefixHolder, start: int, num_bytes: int) -> Fetching | None:
        """Start to fetch a prefix; None if that is not worth it, or if the holder has another prefix.

        Args:
            key: The prompt.
            holder: The node that has the prefix.
            start: Tokens of the prompt that are cached here.
            num_bytes: Estimated bytes of the rest of the prefix.
        """
        address, computed_s = holder.address, self._costs.prompt_s(start, holder.num_tokens)
        if dict(key.digests([holder.num_tokens])).get(holder.num_tokens) != holder.digest:
            log.warning("the prefix of %d tokens at %s belongs to another prompt", holder.num_tokens, address)
            self._client.count_failure("mismatch")
            return None
        now = self._clock()
        if now - self._measured_s.get(address, now) > MEASURE_AGAIN_S:
            self._costs.forget_fetches(address)
        byte_s = self._costs.fetched_byte_s(address)
        predicted_s = num_bytes * byte_s
        if predicted_s >= computed_s:
            self._client.count_failure("slow")
            return None
        fetch = self._client.fetch(address, holder.digest, holder.num_tokens, int(computed_s / byte_s))
        return Fetching(fetch, now, now + max(min(computed_s, FETCH_TIMEOUT_FACTOR * predicted_s), FETCH_TIMEOUT_S))

    def is_over(self, fetching: Fetching, wait_s: float) -> bool:
        """Return whether a fetch has ended, after waiting for at most `wait_s` seconds; it ends at its time limit."""
        fetch, is_done = fetching.fetch, bool(wait([fetching.fetch.done], wait_s).done)
        now = self._clock()
        if not is_done and now < fetching.until_s:
            return False
        if not is_done:
            log.warning("fetching %d tokens from %s takes too long: they are computed", fetch.num_tokens, fetch.address)
            self.stop(fetching)
            self._record(fetch, fetch.num_bytes, now - fetching.began_s)
            return True
        fetched = fetch.done.result()
        if fetched.failure is None:
            self._record(fetch, fetched.num_bytes, fetched.seconds)
        elif fetched.failure not in ("slow", "room", "gone", "mismatch"):
            self._record(fetch, fetched.num_bytes, now - fetching.began_s)
        if fetched.last:
            self._adopt(fetched.last)
        return True

    def stop(self, fetching: Fetching) -> None:
        """End a fetch for which no prompt waits any more; what has arrived stays on disk."""
        fetching.fetch.stop()

    def _record(self, fetch: Fetch, num_bytes: int, seconds: float) -> None:
        self._costs.record_fetch(fetch.address, num_bytes, seconds)
        self._measured_s[fetch.address] = self._clock()
