"""The types by which ingresses and engines agree on the placement of requests, and of the snapshots that they need."""

from dataclasses import dataclass, field
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
    next_s: float = 0.0
    """Seconds by which the price of this request rises once one like it, of another conversation, is booked here."""
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


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Where the snapshots behind a key would be."""

    digest: str
    """Digest of the entry at the boundary of the system part or the turn, stored or not."""
    num_tokens: int
    """Tokens before that boundary."""
    conversation: int | None = None
    """Key of the conversation that the turn belongs to; None for a system part."""
    answer: str | None = None
    """Digest of the entry after the turn's answer; None without one."""
    answer_tokens: int = 0
    """Tokens of prompt and answer."""


@dataclass(frozen=True, slots=True)
class Residence:
    """A conversation that a node has computed lately."""

    keys: ConversationKeys
    num_tokens: int
    """Tokens of its last prompt and answer."""
    system_tokens: int
    """Tokens of its system part."""
    num_turns: int


@dataclass(frozen=True, slots=True)
class MovableSnapshot:
    """A snapshot that another node may take over, with its ancestors."""

    digest: str
    num_tokens: int
    num_bytes: int
    """Estimated bytes of it and its ancestors."""
    rate: float
    """Expected uses per second."""
    idle_s: float
    """Seconds since its last use."""
    is_shared: bool
    """Whether several conversations continue it."""
    has_images: bool
    key: int
    """Key by which its next node is found: of its conversation or system part, else made of its digest."""
    known: tuple[tuple[int, KnownPrefix], ...] = ()
    """The keys of prompts behind which it or one of its ancestors is found."""
    residence: Residence | None = None
    """The conversation that it belongs to, if that lives at the node."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The end of a take-over: what a node has got of the snapshots that it was told of."""

    num_offered: int = 0
    num_taken: int = 0
    """Offered snapshots that are there now, those that were there before included."""
    num_files: int = 0
    """Files that were transferred, ancestors included."""
    num_bytes: int = 0
    """Bytes that were transferred, those of incomplete files included."""
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    """Offered snapshots that are not there, by reason: a NotTaken (snapshot_store/wire.py), or `no_receiver`."""

    def __str__(self) -> str:
        """Tell an operator."""
        if not self.num_offered:
            return "It has no snapshots that other nodes could fetch."
        left = ", ".join(f"{num} {reason}" for reason, num in sorted(self.refused.items()))
        return (
            f"{self.num_taken} of {self.num_offered} snapshots are at other nodes: {self.num_bytes / 1e6:.1f} MB in "
            f"{self.seconds:.1f} s{f'; not moved: {left}' if left else ''}."
        )

    def __add__(self, other: "TakenOver") -> "TakenOver":
        """Return the sum of two take-overs at the same time."""
        reasons = self.refused.keys() | other.refused.keys()
        return TakenOver(
            self.num_offered + other.num_offered,
            self.num_taken + other.num_taken,
            self.num_files + other.num_files,
            self.num_bytes + other.num_bytes,
            max(self.seconds, other.seconds),
            {reason: self.refused.get(reason, 0) + other.refused.get(reason, 0) for reason in sorted(reasons)},
        )
