"""Question and Quote: the types by which an ingress and an engine agree on the placement of a request."""

from dataclasses import dataclass
from typing import Literal

Refusal = Literal["not_ready", "draining", "context", "memory", "media", "queue_full"]
"""Why an engine cannot take a request. `context`: its maximal context is too short. `memory`: its memory never holds
the prompt. `media`: it cannot read the request's images. `queue_full`: max_running + max_queue choices are open."""


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """Keys of a conversation and its prefixes: 64-bit hashes, equal for equal canonical messages of one API key.

    They are found without the tokenizer, where the body of a request is parsed.
    """

    system: int
    """Key of the tools and system messages; prompts of different conversations share it."""
    conversation: int
    """Key of all turns of the conversation: of the client's session, else of the system part and the first turn."""
    turns: tuple[int, ...] = ()
    """Key of each prefix of the messages that ends with a whole message, the longest first: `turns[0]` is the whole
    prompt. At most MAX_TURN_KEYS."""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A node that has a prefix of a prompt, from which an engine may fetch it."""

    address: str
    """`host:port` of its server of snapshots."""
    digest: str
    """Digest of the snapshot."""
    num_tokens: int
    """Tokens of the prefix."""


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A snapshot that a node has of a prompt's prefix."""

    digest: str
    num_tokens: int
    num_bytes: int
    """Estimated bytes of the prefix."""


@dataclass(frozen=True, slots=True)
class Question:
    """The facts of a request from which an engine predicts when its first token would come."""

    request_id: str
    keys: ConversationKeys
    num_tokens: int
    """Estimated tokens of the prompt."""
    num_choices: int = 1
    max_tokens: int | None = None
    """As the client asked; None: no limit of its own."""
    has_images: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Quote:
    """An engine's prediction for a request, at the moment of the question."""

    cached_tokens: int = 0
    """Estimated tokens of the prompt that are cached in memory or on disk."""
    wait_s: float = 0.0
    """Seconds until the prompt is begun."""
    prefill_s: float = 0.0
    """Seconds to compute what is not cached, beside the rows that decode."""
    slowdown_s: float = 0.0
    """Seconds that the answer takes longer because of the other rows."""
    crowding_s: float = 0.0
    """Seconds that other conversations lose in turns to come, because a new one takes their place in the cache."""
    is_resident: bool = False
    """Whether the conversation has been computed here lately."""
    snapshot: CachedSnapshot | None = None
    """The longest snapshot of the prompt's prefix, which other nodes may fetch, also from one that refuses the request;
    None without one."""
    fetch_bytes_per_s: float = 0.0
    """Bytes per second at which this engine fetches from other nodes and reads what it has fetched; 0: it cannot."""
    refusal: Refusal | None = None

    @property
    def seconds(self) -> float:
        """The price of placing the request here."""
        return self.wait_s + self.prefill_s + self.slowdown_s + self.crowding_s
