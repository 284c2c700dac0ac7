"""PrefixIndex: finds the entries that a prompt begins with, and knows the order of their last use. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.prompt_key import PromptKey


class PrefixIndex:
    """All entries, in memory or only on disk."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, CacheEntry] = OrderedDict()  # by digest, least recently used first
        self._lengths: dict[str, Counter[int]] = {}  # tenant -> lengths of its entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[CacheEntry]:
        """Return all entries, the most recently used first."""
        return reversed(self._entries.values())

    def get(self, digest: str | None) -> CacheEntry | None:
        return None if digest is None else self._entries.get(digest)

    def match(self, key: PromptKey, max_tokens: int, in_memory: bool = False) -> CacheEntry | None:
        """Return the longest stored prefix of at most `max_tokens` tokens; None without one.

        Tokens, images and tenant are compared, not only digests.

        Args:
            key: The prompt.
            max_tokens: Largest number of tokens of the prefix.
            in_memory: Whether to ignore entries that are only on disk.
        """
        lengths = sorted(length for length in self._lengths.get(key.tenant, ()) if length <= max_tokens)
        found = [self._entries[digest] for _, digest in key.digests(lengths) if digest in self._entries]
        for entry in reversed(found):
            is_there = entry.node is not None or not in_memory
            if is_there and entry.key.tenant == key.tenant and key.starts_with(entry.key):
                return entry
        return None

    def path(self, entry: CacheEntry) -> list[CacheEntry]:
        """Return the entry and its stored ancestors, nearest first, up to the first that is missing."""
        path = []
        at: CacheEntry | None = entry
        while at is not None:
            path.append(at)
            at = self.get(at.parent)
        return path

    def insert(self, entry: CacheEntry) -> None:
        """Insert an entry as the most recently used one."""
        assert entry.digest not in self._entries
        self._entries[entry.digest] = entry
        self._lengths.setdefault(entry.key.tenant, Counter())[entry.num_tokens] += 1

    def touch(self, entry: CacheEntry) -> None:
        """Make an entry the most recently used one."""
        self._entries.move_to_end(entry.digest)

    def remove(self, entry: CacheEntry) -> None:
        del self._entries[entry.digest]
        lengths = self._lengths[entry.key.tenant]
        lengths[entry.num_tokens] -= 1
        if not lengths[entry.num_tokens]:
            del lengths[entry.num_tokens]
        if not lengths:
            del self._lengths[entry.key.tenant]

    def clear(self) -> None:
        self._entries.clear()
        self._lengths.clear()

    def integrity_error(self) -> str | None:
        """Return the first inconsistency; None without one."""
        lengths = {tenant: Counter[int]() for tenant in self._lengths}
        for entry in self._entries.values():
            lengths[entry.key.tenant][entry.num_tokens] += 1
        return None if lengths == self._lengths else "the index by length does not match the entries"
