"""PrefixLookup: tells the scheduler and the planner what is cached of prompts that have not begun."""

from collections.abc import Mapping, Sequence

from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.eligibility import Eligibility
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.session import PrefixCacheSession
from engine.core.request import Request
from engine.protocol import EngineRequest


class PrefixLookup:
    """Implements core.scheduler_context.Prefixes.

    Args:
        cache: The stored snapshots.
        eligibility: Which prompts may use them.
        loans: Tracks lent KV segments.
        sessions: The prompts in progress by the id of their first row; the mapping of `PrefixCacheSessions`.
        min_tokens: Fewest additional tokens for which a prompt waits for another one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        eligibility: Eligibility,
        loans: Loans,
        sessions: Mapping[str, PrefixCacheSession],
        min_tokens: int,
    ):
        self._cache = cache
        self._eligibility = eligibility
        self._loans = loans
        self._sessions = sessions
        self._min_tokens = min_tokens

    def num_cached(self, row: Request) -> int:
        """Return how many tokens of a row's prompt are cached now; does not count as a use."""
        if not self._eligibility.uses_cache(row):
            return 0
        key, index, counters = self._eligibility.key_of(row), self._cache.index, self._cache.counters
        version = (len(key), counters.num_stored, counters.num_evicted, len(index))
        if row.cached_hint is None or row.cached_hint[0] != version:
            entry = index.match(key, self._eligibility.max_tokens(row, key))
            row.cached_hint = version, 0 if entry is None else entry.num_tokens
        return row.cached_hint[1]

    def peek(self, spec: EngineRequest) -> int:
        """Return how many tokens of a prompt are cached.

        They count as used, so that a plan based on them still finds them.
        """
        if self._eligibility.off_reason is not None:
            return 0
        key = self._eligibility.key(spec, spec.token_ids)
        entry = self._cache.index.match(key, len(key) - 1)
        if entry is None:
            return 0
        self._cache.touch(entry)
        return entry.num_tokens

    def source_of(self, row: Request) -> Request | None:
        """Return the first row of the prompt in progress that will store the longest prefix of this row's prompt.

        None if a prefix as long is cached already, or no prompt in progress shares one.
        """
        others = [one for one in self._sessions.values() if one.row is not row and one.is_computing and one.todo]
        if not others or not self._eligibility.uses_cache(row) or row.id in self._sessions:
            return None
        key = self._eligibility.key_of(row)
        longest, source = self.num_cached(row), None
        for other in others:
            if other.key.tenant != key.tenant:
                continue
            num_common = min(key.num_common(other.key), self._eligibility.max_tokens(row, key))
            reached = max((b.num_tokens for b in other.todo if b.num_tokens <= num_common), default=0)
            if reached >= longest + self._min_tokens:
                longest, source = reached, other.row
        return source

    def promise(self, rows: Sequence[Request]) -> bool:
        """Count the keys and values that a request will take over from the cache as the request's memory; see loans.py.

        Returns whether there are any.
        """
        row = rows[0]
        if not self._eligibility.may_lend(rows) or self.num_cached(row) == 0:
            return False
        key = self._eligibility.key_of(row)
        entry = self._cache.index.match(key, self._eligibility.max_tokens(row, key), in_memory=True)
        return entry is not None and self._loans.promise(row.id, entry)

    def cancel(self, rows: Sequence[Request]) -> None:
        """Revoke `promise` for a request that is not admitted."""
        self._loans.cancel(rows[0].id)
