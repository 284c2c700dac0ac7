"""The seam between scheduler and runner: what a runner computes, and its outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from engine.core.memory.costs import MemoryCosts
from engine.core.prefix_cache.node import KVSegment, Snapshot
from engine.core.row import Row
from engine.protocol import TokenLogprobs

if TYPE_CHECKING:
    from engine.core.prompt import Prompt

NO_TOKEN = -1
"""Stands for a token where the logits are not finite."""

SEGMENT_ARRAYS = "attention."
"""Prefix of the names of keys and values in an exported snapshot."""


Encoded = Literal["embeddings", "scores"]
"""Results of an encoder: embeddings of texts, or scores of pairs of texts."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """How a decode step drafts tokens."""

    num_tokens: int = 0
    """Draft tokens per row; 0 for plain decoding."""
    proposer: str = "mtp"
    """Name of the proposer that makes them; ignored if num_tokens is 0."""
    is_forced: bool = False
    """Whether a selective proposer drafts arbitrary tokens where it has none, so that the step can be measured."""
    is_selective: bool = field(default=False, compare=False, repr=False)
    """Whether the proposer drafts for some rows only, and looks at the tokens of the step before to know for which."""
    option: str = field(default="", compare=False, repr=False)
    """Name of the option with the proposer's mode, if it has another name: one option is for all heads."""

    @property
    def name(self) -> str:
        """The number of drafts by the proposer of PLAIN, as "3"; name and number of others, as "other 4"."""
        return str(self.num_tokens) if self.proposer == PLAIN.proposer else f"{self.proposer} {self.num_tokens}"


PLAIN = Drafts()


@dataclass(slots=True)
class RowOutput:
    """The output of one row in a step."""

    token_ids: tuple[int, ...]
    """New tokens; a stop token is included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if the row asks for them."""
    num_drafted: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    """Accepted draft tokens; may exceed len(token_ids), as drafts after a stop token were accepted, too."""
    proposer: str = PLAIN.proposer
    """Name of the proposer of the draft tokens."""
    can_draft: frozenset[str] = frozenset()
    """The selective proposers that could draft the row's next tokens."""
    error: str | None = None
    """Why this row alone failed; None if it did not."""
    embedding: bytes | None = None
    """See TokenChunk; such a row has no tokens and does not join the decode batch."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """See TokenChunk."""


@dataclass(slots=True)
class PrefillOutput:
    """The result of a chunk."""

    num_tokens: int
    """Computed prompt tokens."""
    first: Mapping[str, RowOutput] | None = None
    """Row id -> first token of every choice, once the prompt is complete and its rows have joined; None before."""


@dataclass(frozen=True, slots=True)
class ImageLeft:
    """An image that must be encoded before its prompt's next chunk."""

    num_patches: int
    num_blocks: int
    """Blocks of the vision tower that are left to compute."""
    depth: int
    """Blocks of the tower in all."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """The next tokens of a prompt, for a forward of its own or one that is shared with other prompts."""

    row: Row
    """The first row of the prompt. In a shared forward it is the only one, and the request has no images, sparse plan
    or logprobs of the prompt, and pooling only if the runner is an encoder (`core.burst.may_burst`)."""
    num_tokens: int
    """At least 1, and at most the remaining tokens of the prompt."""

    @property
    def prompt(self) -> "Prompt":
        return self.row.prompt


@dataclass(frozen=True, slots=True, eq=False)
class RowSnapshot:
    """The state of a decoding row, and the tokens it has processed."""

    token_ids: np.ndarray
    """int32: tokens processed after the request's own prompt (`spec.token_ids`). The last ones may not have been
    published yet, see `ModelRunner.snapshot_row`."""
    snapshot: Snapshot
    """The state after the prompt and these tokens."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The measured time of a decode step."""

    num_rows: int
    """Rows that it decoded."""
    drafts: Drafts
    """Draft tokens that it verified per row."""
    seconds: float
    """Its time when the step before had the same rows and drafts."""


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """The measured time of the first chunk of a prompt."""

    num_tokens: int
    seconds: float
    """Its time when a chunk of the same size had been computed before."""


class ModelRunner(Protocol):
    """Computes; never decides. All methods run on the device thread; the attributes never change.

    A row is a `core.row.Row`. Its prompt is `row.prompt_token_ids`, which includes generated tokens after a preemption,
    and of which only those at `row.computed_positions` are computed and counted.
    """

    max_context_tokens: int
    vocab_size: int
    """Number of logits; token ids of answers are below it."""
    num_embeddings: int
    """Token ids of prompts are below it."""
    drafts: Sequence[Drafts]
    """The ways to draft, at least one token each; empty if the model cannot speculate."""
    no_drafts: Mapping[str, str]
    """Why a proposer cannot draft; without those that can."""
    capabilities: dict[str, Any]
    image_token_id: int | None
    """The placeholder of images in prompts; None for a text model."""
    whole_images: bool
    """Whether the tokens of an image see each other, so that no chunk may end among them."""
    whole_prompts: str | None
    """Why each prompt is one chunk: its tokens see each other in both directions, so that the state after some of them
    depends on all, and nothing of it is cached. None if each token sees those before it."""
    encoder: Encoded | None
    """Results of an encoder, which has `whole_prompts`; None for a model that generates text. All requests of an
    encoder have `pooling`, and it has no state to decode from."""
    snapshots_prefixes: bool
    """Whether `snapshot` can return the state after fewer tokens of a prompt than are computed."""
    no_sparse: str | None
    """Why this model cannot execute a sparse plan, None if it can."""
    no_pooling: str | None
    """Why this model returns no hidden states, None if it does."""
    no_bursts: str | None
    """Why `prefill_burst` cannot be called, None if it can."""
    fingerprint: str
    """Hex digest of everything that a snapshot depends on: weights, dtype, layout."""
    costs: MemoryCosts
    """Memory costs of rows, prompts and images; final once the runner is constructed."""
    step_times: Sequence[StepTime]
    """Decode steps measured at warm-up; empty if it was skipped."""
    chunk_times: Sequence[ChunkTime]
    """Chunks measured at warm-up; empty if it was skipped."""
    snapshot_s: float
    """Seconds of taking a snapshot of few tokens and restoring it, measured at warm-up on a GPU; otherwise 0."""
    memory_limit_bytes: int
    """Memory that the engine may use unless it is configured."""

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of images that are cached for later requests."""
        ...

    @property
    def active_bytes(self) -> int:
        """Bytes of the device's memory in use now, with results of finished work that are not freed yet."""
        ...

    def settled_bytes(self) -> int:
        """Wait for the device, which then frees the results of finished work, and return the bytes in use."""
        ...

    def free_caches(self) -> None:
        """Free cached image features and buffers kept for reuse. Snapshots are not affected."""
        ...

    def probe(self) -> None:
        """Compute a forward independent of all rows. Raises whatever the device raises if it does not work."""
        ...

    def decode(self, drafts: Drafts = PLAIN) -> Mapping[str, RowOutput]:
        """Compute one step for every row of the decode batch.

        Outputs may lag behind by one step: a call then launches a step and returns the tokens of the step that the
        previous call launched, with the previous call's drafts.

        Args:
            drafts: How to draft. Groups of rows for which a selective proposer has nothing decode without drafts.

        Returns:
            Row id -> 1 to drafts.num_tokens + 1 new tokens, or NO_TOKEN.
        """
        ...

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        """Compute at most the next `max_tokens` tokens of the prompt that `rows` share.

        With its last token the rows join the decode batch, in the group `row.decode_group`; a row with `pooling` gets
        its embedding instead and does not join. `next_image` must have returned None, if the prompt has images.
        """
        ...

    def next_image(self, rows: Sequence[Row]) -> ImageLeft | None:
        """Return the image to encode before the next chunk of the prompt that `rows` share; None without one.

        Images with cached features are skipped.
        """
        ...

    def encode(self, rows: Sequence[Row], num_blocks: int) -> None:
        """Compute the next piece of that image: `num_blocks` blocks of the vision tower, or the remaining ones."""
        ...

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> Sequence[PrefillOutput]:
        """Compute chunks of several prompts in one forward, each with the same result as `prefill`.

        Returns:
            An output for each chunk, in their order.

        Raises:
            Exception: Whatever the device raises; all of the prompts are dropped then and must begin anew.
        """
        ...

    def restore(self, rows: Sequence[Row], snapshot: Snapshot, lend: Sequence[KVSegment] = ()) -> None:
        """Begin the prompt that `rows` share with the state after its first tokens; it must not have begun.

        Args:
            rows: The rows that share the prompt.
            snapshot: The state.
            lend: KV segments of the snapshot that move into the prompt's cache. They are lent from then on, even if
                this raises.
        """
        ...

    def snapshot(
        self, rows: Sequence[Row], parent: KVSegment | None, lend: bool = False, num_tokens: int | None = None
    ) -> Snapshot | None:
        """Take a snapshot of the prompt that `rows` share.

        Args:
            rows: The rows that share the prompt. If `snapshots_prefixes`, they may be decoding.
            parent: The KV segment of a snapshot of a shorter prefix of the same prompt; None without one.
            lend: Leave the snapshot's own keys and values in the row's cache instead of copying them.
            num_tokens: The state after this many tokens, which may be fewer than are computed if `snapshots_prefixes`;
                None: after all that are computed.

        Returns:
            None if the state contains NaN or inf; such a snapshot must not be reused.
        """
        ...

    def pending(self, row_ids: Sequence[str]) -> Mapping[str, RowOutput]:
        """Wait for the step in flight and return the outputs of these rows.

        The rows must be dropped before the next `decode`.

        Other rows get their outputs from that `decode`. Rows that the step does not decode are left out.

        Raises:
            Exception: Whatever the device raises; the rows of the batch are in an unknown state then.
        """
        ...

    def snapshot_row(self, row_id: str, parent: KVSegment | None = None, lend: bool = False) -> RowSnapshot | None:
        """Take a snapshot of a decoding row, without effect on it or others. Call it before `drop`.

        The state of a row that has finished, without a call of `decode` since, includes its last token, also a stop
        token. If that was its first token, no step has processed it, and the state is that after the prompt. The state
        of a row that has not finished includes the outputs of the step in flight, except for the last one.

        Args:
            row_id: The row.
            parent: The KV segment of a snapshot of the row's first tokens; None without one.
            lend: Leave the keys and values after `parent` in the row's cache until `drop`, which must follow before the
                next `decode`.

        Returns:
            None if the row is not decoding, had a sparse plan, or its state is not finite.
        """
        ...

    def export_snapshot(self, snapshot: Snapshot) -> dict[str, np.ndarray]:
        """Return the arrays that `import_snapshot` needs besides the parent, in host memory.

        They are not copied where that is possible.

        Names of keys and values begin with SEGMENT_ARRAYS.
        """
        ...

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: KVSegment | None, with_state: bool = True
    ) -> Iterator[Snapshot | None]:
        """Copy a snapshot of the first num_tokens tokens to the device, layer by layer.

        Args:
            arrays: The exported arrays. Each is removed once it is copied, so that its memory is freed.
            num_tokens: Tokens before the snapshot's boundary.
            parent: The KV segment before its own; None without one.
            with_state: Whether to import recurrent states. Without them no prompt can continue from the snapshot.

        Yields:
            None after each layer, and the snapshot at the end.

        Raises:
            ValueError: The arrays do not match this model or `parent`.
        """
        ...

    def fill(self, row_id: str, segments: Sequence[KVSegment]) -> None:
        """Copy keys and values that are lent to a row from its cache into their KV segments; the row keeps running.

        Args:
            row_id: The row.
            segments: Parts of the row's prompt, in order. Segments that are not in the row's cache stay lent.
        """
        ...

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[KVSegment]] | None = None) -> None:
        """Free the memory of these rows; unknown ids are ignored. A shared prompt is freed with the last of its rows.

        Args:
            row_ids: The rows.
            lent: KV segments lent to each row, by row id, in order. They are copied back layer by layer before the
                layer is freed; segments that are not in the row's cache stay lent.
        """
        ...

    def reset(self) -> None:
        """Drop all rows of the decode batch, whatever their state. Prompts in progress stay."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes in use by purpose."""
        ...

    def close(self) -> None: ...
