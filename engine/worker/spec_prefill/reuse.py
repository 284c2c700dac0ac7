"""The draft's cache: snapshots after prefixes of prompts, and the importance of the last few prompts."""

import logging
import time
from collections import OrderedDict

import numpy as np

from engine.config import BoundaryKind
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.store import SnapshotStore
from engine.protocol import PromptOrigin
from engine.worker.kv_cache import SequenceCache
from engine.worker.snapshot import StateSnapshot, is_finite, restore, take
from engine.worker.spec_prefill.draft import Draft

log = logging.getLogger("orchard.scorer")

MAX_IMPORTANCES = 8


class DraftReuse:
    """Caches the draft's snapshots and scores.

    Prompts in progress hold no references to snapshots: a restored prefix is copied into the prompt's own cache, and
    the parents of its own snapshots are looked up again.
    """

    def __init__(self, draft: Draft):
        self._draft = draft
        self._store = SnapshotStore()
        self._memory = SnapshotMemory(self._store, 0)
        self._importances: OrderedDict[str, np.ndarray] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def limit(self, max_bytes: int) -> None:
        """Set the bytes of all snapshots; the least recently used are removed first."""
        self._memory.max_bytes = max_bytes
        self._make_room(0)

    def touch(self, key: PromptKey, max_tokens: int) -> SnapshotNode | None:
        """Return the longest cached prefix of at most `max_tokens` tokens and mark it as used; None without one."""
        node = self._store.match(key, max_tokens)
        if node is not None:
            self._store.touch(node)
        return node

    def restore(self, key: PromptKey, cache: SequenceCache, num_slots: int) -> int:
        """Restore the longest cached prefix into an empty cache; return its number of tokens, never all of the prompt.

        Raises whatever the library raises; the snapshot is removed then.
        """
        node = self.touch(key, len(key) - 1)
        if node is None:
            return 0
        assert isinstance(node.snapshot, StateSnapshot)
        try:
            restore(node.snapshot, cache, num_slots)
        except Exception:
            self._store.forget(node)
            raise
        return node.num_tokens

    def store(self, key: PromptKey, kind: BoundaryKind, cache: SequenceCache) -> str | None:
        """Store the state after all tokens of `key`; return its digest, or None if nothing was stored.

        Nothing is stored if the state is stored already, does not fit, or contains NaN or inf.
        """
        parent = self.touch(key, len(key))
        num_tokens = len(key) - (parent.num_tokens if parent is not None else 0)
        if num_tokens == 0 or not self._make_room(self._draft.cache_bytes(num_tokens)):
            return None
        if not is_finite(cache):
            log.warning("the draft's state after %d tokens contains NaN or inf and is not stored", len(key))
            return None
        before = parent.snapshot if parent is not None else None
        if not isinstance(before, StateSnapshot):  # it was just evicted
            parent = before = None
        snapshot = take(cache, None, len(key), None if before is None else before.segment)
        digest, now = key.digest(), time.monotonic()
        base_digest = None if parent is None else parent.digest
        node = SnapshotNode(digest, key, kind, base_digest, PromptOrigin(), pinned=False, created_s=now, used_s=now)
        return digest if self._memory.add(node, snapshot, parent) is not None else None

    def forget(self, digest: str) -> None:
        """Remove a snapshot; unknown digests are ignored."""
        if (node := self._store.get(digest)) is not None:
            self._store.forget(node)

    def importance(self, key: PromptKey) -> np.ndarray | None:
        """Return the importance float32 [num_prompt_tokens] of a recently scored prompt; None if unknown."""
        digest = key.digest()
        if digest in self._importances:
            self._importances.move_to_end(digest)
        return self._importances.get(digest)

    def remember(self, key: PromptKey, importance: np.ndarray) -> None:
        """Keep the importance of a scored prompt."""
        self._importances[key.digest()] = importance
        while len(self._importances) > MAX_IMPORTANCES:
            self._importances.popitem(last=False)

    def clear(self) -> None:
        """Remove everything."""
        self._store.reset()
        self._importances.clear()

    def _make_room(self, num_bytes: int) -> bool:
        """Evict snapshots until `num_bytes` are free; return False if they do not fit at all."""
        if num_bytes > self._memory.max_bytes:
            return False
        while self._store.num_bytes + num_bytes > self._memory.max_bytes:
            *_, oldest = self._store.nodes()
            self._store.forget(oldest)
        return True
