"""What the scheduler asks of the runner in one step, and what comes back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.core.memory.costs import MemoryCosts
from engine.core.memory.grouping import GroupMerge
from engine.core.prefix_cache.node import Snapshot, Stretch
from engine.core.request import Request
from engine.protocol import TokenLogprobs

NO_TOKEN = -1
"""Instead of a token id: the model gave no finite logits."""

STRETCH_ARRAYS = "attention."
"""How the names of the keys and values in an exported snapshot begin."""


@dataclass(slots=True)
class SchedulerOutput:
    """The first half of a step: rows that the runner drops, then a decode step of all running rows.

    Chunks of prompts follow, one by one: see Scheduler.next_prompt.
    """

    drop: list[str] = field(default_factory=list)
    decode: bool = False
    merges: list[GroupMerge] = field(default_factory=list)
    """Decode groups that become one before the decode step."""


@dataclass(slots=True)
class RowOutput:
    """What one row got in a step. logprobs: one per token, if the row asks for them. error: this row alone failed.

    num_drafted, num_accepted: draft tokens that were verified, and how many of them hold: those behind the row's last
    token, which are not among token_ids, too.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None
    embedding: bytes | None = None
    """See TokenChunk; the row has no tokens then, and does not join the decode batch."""


@dataclass(slots=True)
class PrefillOutput:
    """num_tokens: prompt tokens now in the cache (0 when an image was encoded instead).

    first: row id -> first token, for all choices at once, set when the prompt is complete and the rows have joined.
    """

    num_tokens: int
    first: Mapping[str, RowOutput] | None = None


@dataclass(frozen=True, slots=True)
class ImageLeft:
    """An image that must be encoded before its prompt's next chunk."""

    num_patches: int
    num_blocks: int
    """Blocks of the vision tower that it has not passed yet."""
    depth: int
    """All blocks of the tower."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """The next tokens of a prompt, for a forward that it shares with those of others."""

    row: Request
    """The only row of the prompt, which has neither images nor a sparse plan nor pooling nor a grammar."""
    num_tokens: int
    """At least 1, and no more than are left of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSnapshot:
    """The state of a decoding row, and what it has seen.

    token_ids: int32, what the row has taken in behind its request's own prompt (`spec.token_ids`): the two together
    are the tokens of the state. They may differ at the end from what the row has given out: see `snapshot_row`.
    snapshot: as one of a prompt with these tokens.
    """

    token_ids: np.ndarray
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class StepTime:
    """A decode step that was measured."""

    num_rows: int
    """Rows that it decoded."""
    num_drafts: int
    """Draft tokens that it verified for each row."""
    seconds: float
    """How long it took, when the one before was like it."""


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """A chunk of a prompt, with nothing in front of it, that was measured."""

    num_tokens: int
    seconds: float
    """How long it took when one of the same size had been computed before."""


class ModelRunner(Protocol):
    """Computes; never decides. All methods run on the device thread; the attributes never change.

    A row is a `core.Request`; its prompt is `row.prompt_token_ids`, which holds the tokens that it has given out
    already when it was preempted, and of which `row.computed_index` are computed; they alone are counted.
    max_draft_tokens: 0 without an MTP head. image_token_id: the placeholder in prompts.
    no_snapshots: why this model's prompts cannot be cached, None if they can. no_sparse: why it can carry out no sparse
    plan. device_bytes: memory of the device; memory_limit_bytes: what the engine may use of it unless it is told.
    costs: what things take of it, known once the runner is made.
    fingerprint: hex digest of all that a snapshot depends on: weights, dtype, layout.
    """

    max_context_tokens: int
    vocab_size: int
    max_draft_tokens: int
    capabilities: dict[str, Any]
    image_token_id: int | None
    no_snapshots: str | None
    no_sparse: str | None
    no_pooling: str | None
    """Why this model gives no hidden states, None if it does."""
    no_bursts: str | None
    """Why `prefill_burst` cannot be called, None if it can."""
    device_bytes: int
    fingerprint: str
    costs: MemoryCosts
    step_times: Sequence[StepTime]
    """Decode steps that were measured at warm-up; none if it was left out."""
    chunk_times: Sequence[ChunkTime]
    """Chunks that were measured at warm-up; none if it was left out."""
    memory_limit_bytes: int

    @property
    def feature_bytes(self) -> int:
        """Of pictures' features that are kept in case the pictures come back."""
        ...

    @property
    def active_bytes(self) -> int:
        """Of the device, in use now."""
        ...

    def free_caches(self) -> None:
        """Gives back what no answer depends on: features of pictures, buffers kept for reuse. Not the snapshots."""
        ...

    def probe(self) -> None:
        """A forward of its own, beside all rows: raises if the device does not work."""
        ...

    def decode(self, num_draft_tokens: int = 0) -> Mapping[str, RowOutput]:
        """One step for every row that has joined: row id -> its new tokens, 1 to num_draft_tokens + 1 or NO_TOKEN.

        Tokens may come out one call after the one that started them: with the number of drafts of that call.
        """
        ...

    def merge_groups(self, source: int, target: int) -> None:
        """Move the rows of decode group `source` to `target`, layer by layer; `decode` must follow before any `drop`.

        Either may have no rows in the decode batch yet. When it raises, the rows of both are in an unknown state.
        """
        ...

    def prefill(self, rows: Sequence[Request], max_tokens: int) -> PrefillOutput:
        """The next at most `max_tokens` tokens of the prompt that `rows` share. With the last of them the rows join the
        decode batch, in the group of their rectangle; or, with `pooling`, get their embedding and do not join.

        As long as `next_image` gives an image, the rest of that image is encoded instead."""
        ...

    def next_image(self, rows: Sequence[Request]) -> ImageLeft | None:
        """Return the image that must be encoded before the next chunk of the prompt that `rows` share, None without
        one. Images whose features are kept are skipped."""
        ...

    def encode(self, rows: Sequence[Request], num_blocks: int) -> None:
        """Compute the next piece of that image: so many blocks of the vision tower, or as many as are left."""
        ...

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> Sequence[PrefillOutput]:
        """Compute chunks of several prompts in one forward; each prompt gets what `prefill` would give it.

        Returns:
            An output for each chunk, in their order.

        Raises:
            Exception: whatever the device raises. All of the prompts are forgotten then, and have to begin anew.
        """
        ...

    def restore(self, rows: Sequence[Request], snapshot: Snapshot, lend: Sequence[Stretch] = ()) -> None:
        """Begin the prompt that `rows` share with the state behind its first tokens; it has not begun yet.

        lend: stretches of the snapshot whose keys and values move into the prompt's cache. They are lent from then on,
        also if this raises.
        """
        ...

    def snapshot(self, rows: Sequence[Request], parent: Stretch | None, lend: bool = False) -> Snapshot | None:
        """Take a snapshot of the prompt in progress that `rows` share, as it stands.

        Args:
            rows: They share the prompt.
            parent: The stretch of a snapshot of a shorter prefix of the same prompt, None without one.
            lend: Its own stretch is lent to the row from the beginning: no key and no value is copied.

        Returns:
            None if the state is not finite: nothing may continue from it.
        """
        ...

    def pending(self, row_ids: Sequence[str]) -> Mapping[str, RowOutput]:
        """Wait for the step under way and return what it gives these rows, which must be dropped before the next
        `decode`. Other rows get theirs from that. Rows that the step does not decode are left out.

        Raises:
            Exception: Whatever the device raises; the rows of the batch are in an unknown state then.
        """
        ...

    def snapshot_row(
        self, row_id: str, parent: Stretch | None = None, cuts: Sequence[int] = (), lend: bool = False
    ) -> RowSnapshot | None:
        """Of a row of the decode batch, as it stands; nothing changes for it or for others. Call it before `drop`.

        A row that has ended by a stop token or by its length, and has not been decoded since, stands exactly behind its
        last token, the stop token included; one that ends with the first token that `prefill` gave stands behind its
        prompt. Any other row has also taken in what the step under way gives it, but for the last token of it.

        Args:
            row_id: of the row.
            parent: the stretch of a snapshot of the row's first tokens, None without one.
            cuts: token counts, rising, between the end of `parent` and the row's end. The stretch behind `parent` is
                made of several, each the parent of the next, that end at these counts and at the row's end.
            lend: The stretch behind `parent`, which has no cuts, is lent to the row until `drop`, which must follow
                before the next `decode`.

        Returns:
            None if the row is not decoding, if its prompt had a sparse plan, or if its state is not finite.

        Raises:
            ValueError: `cuts` do not rise from the end of `parent` to that of the row.
        """
        ...

    def export_snapshot(self, snapshot: Snapshot) -> dict[str, np.ndarray]:
        """Return the arrays that `import_snapshot` needs besides the parent, in host memory, not copied if possible.

        The names of those of the stretch begin with STRETCH_ARRAYS.
        """
        ...

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: Stretch | None, with_state: bool = True
    ) -> Iterator[Snapshot | None]:
        """Copy a snapshot of the first num_tokens tokens to the device, one layer after the other.

        Yields None behind each layer, and the snapshot at the end.

        Args:
            arrays: What was exported. Each is removed once it is copied, so that its memory is free.
            num_tokens: In front of the snapshot's boundary.
            parent: The stretch in front of its own.
            with_state: Without it the arrays are the stretch's alone, and no prompt can continue from the snapshot.

        Raises:
            ValueError: The arrays are not of this model, or not behind `parent`.
        """
        ...

    def fill(self, row_id: str, stretches: Sequence[Stretch]) -> None:
        """Copy the keys and values that are lent to a row, which goes on, back into their stretches.

        stretches: parts of the row's prompt, in order. Those that the row does not hold stay lent.
        """
        ...

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Stretch]] | None = None) -> None:
        """Free what these rows hold; unknown ids are ignored. A shared prompt goes with the last of its rows.

        lent: by row id the stretches that are lent to the row, in order. They are filled layer by layer before the
        layer is freed; those that the row does not hold stay lent.
        """
        ...

    def reset(self) -> None:
        """Lets go of all rows, whatever state they are in. Prompts in progress stay."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for."""
        ...

    def close(self) -> None: ...
