"""KnownPrefixes: which snapshots belong to the keys of conversations and their prefixes. Pure.

The engine thread writes, other threads read: a reader uses single dict look-ups only, which Python makes atomic.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from engine.core.prefix_cache.node import SnapshotNode
from engine.placement import ConversationKeys, KnownPrefix

MAX_KEYS = 16_384
"""Keys that are remembered; the least recently written one is forgotten first."""


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The cached part of a prompt."""

    num_tokens: int = 0
    is_on_disk: bool = False
    """Whether it must be read from disk."""
    node: SnapshotNode | None = None
    """The snapshot at its end; None if nothing is cached."""


NOTHING = CachedTokens()


class KnownPrefixes:
    """Finds the cached prefix of a prompt by its keys.

    Args:
        find: Returns the stored snapshot with a digest; None if it has been evicted. Called on any thread.
        max_keys: Keys to remember.
    """

    def __init__(self, find: Callable[[str | None], SnapshotNode | None], max_keys: int = MAX_KEYS):
        self._find = find
        self._max_keys = max_keys
        self._prefixes: OrderedDict[int, KnownPrefix] = OrderedDict()

    def note(self, key: int, digest: str, num_tokens: int, conversation: int | None = None) -> None:
        """Remember the boundary after a key, as soon as a prompt with it has arrived.

        Args:
            key: The key.
            digest: Digest of the snapshot at the boundary.
            num_tokens: Tokens before it.
            conversation: Key of the conversation; None for a system part.
        """
        known = self._prefixes.get(key)
        if known is None or known.digest != digest:
            known = KnownPrefix(digest, num_tokens, conversation)
        self._put(key, known)

    def take_over(self, key: int, known: KnownPrefix) -> None:
        """Remember what another node knew of a key, unless a snapshot is stored after it here."""
        own = self._prefixes.get(key)
        if own is None or (self._find(own.digest) is None and self._find(own.answer) is None):
            self._put(key, known)

    def by_digest(self, keys: Iterable[int] | None = None) -> dict[str, list[tuple[int, KnownPrefix]]]:
        """Return keys and what is known of them, by each digest that they lead to. keys: None for all."""
        found: dict[str, list[tuple[int, KnownPrefix]]] = {}
        for key in self._prefixes if keys is None else keys:
            if (known := self._prefixes.get(key)) is None:
                continue
            for digest in filter(None, (known.digest, known.answer)):
                found.setdefault(digest, []).append((key, known))
        return found

    def _put(self, key: int, known: KnownPrefix) -> None:
        self._prefixes[key] = known
        self._prefixes.move_to_end(key)
        if len(self._prefixes) > self._max_keys:
            self._prefixes.popitem(last=False)

    def note_answer(self, key: int, node: SnapshotNode) -> None:
        """Remember the snapshot after the answer to the turn of a key."""
        if (known := self._prefixes.get(key)) is not None:
            self._prefixes[key] = replace(known, answer=node.digest, answer_tokens=node.num_tokens)

    def last_of(self, keys: ConversationKeys) -> SnapshotNode | None:
        """Return the snapshot from which the next turn of a conversation would go on; None if none is stored.

        Args:
            keys: The keys of its last prompt, which is answered.
        """
        for known in filter(None, map(self._prefixes.get, keys.turns)):
            if (node := self._find(known.answer) or self._find(known.digest)) is not None:
                return node
        return None

    # On any thread.

    def num_system_tokens(self, keys: ConversationKeys) -> int:
        """Return the tokens of a system part, cached or not; 0 if unknown."""
        known = self._prefixes.get(keys.system)
        return 0 if known is None else known.num_tokens

    def cached(self, keys: ConversationKeys, max_tokens: int) -> CachedTokens:
        """Return the longest cached prefix of a prompt.

        Args:
            keys: The prompt's keys.
            max_tokens: Estimated tokens of the prompt; nothing longer is returned.
        """
        for position, key in enumerate(keys.turns):
            known = self._prefixes.get(key)
            if known is None:
                continue
            follows = position > 0 and known.answer_tokens <= max_tokens  # the prompt goes on after this turn's answer
            answer = self._find(known.answer) if follows else None
            found = answer or self._find(known.digest)
            if found is not None:
                return CachedTokens(min(found.num_tokens, max_tokens), found.snapshot is None, found)
        known = self._prefixes.get(keys.system)
        found = None if known is None else self._find(known.digest)
        if found is None:
            return NOTHING
        return CachedTokens(min(found.num_tokens, max_tokens), found.snapshot is None, found)
