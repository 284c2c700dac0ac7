"""PrefillExecutor: computes the pieces of prompts that the scheduler chooses."""

import math
from collections.abc import Callable, Sequence

from engine.core.cost_model import CostModel
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.loans import MemoryTaken
from engine.core.progress import WorkInProgress
from engine.core.prompt import Prompt
from engine.core.runner import ImageLeft, ModelRunner, PrefillOutput, PromptChunk
from engine.core.scheduler import Scheduler
from engine.core.scheduler_output import Published
from engine.status import EngineCounters

DISK_WAIT_S = 0.05  # blocking wait for a snapshot from disk or another node when there is no other work

MIN_CHUNK_PART = 0.3
"""A chunk's time is measured with the decode step before it, whose predicted seconds are subtracted; at least this
share of it is the chunk's own."""


class PrefillExecutor:
    """Computes prompts piece by piece, publishes their first tokens, and takes their snapshots at boundaries.

    Args:
        runner: Computes forward passes.
        scheduler: Chooses chunks, and receives their outputs.
        prefixes: The prefix cache.
        costs: Learns from every chunk and piece of an image.
        stats: Counters.
        progress: Names the work in progress.
        max_stall_s: See SchedulerConfig.
        clock: Returns monotonic seconds.
        publish: Receives first tokens.
        failed: Called with a prompt that has failed.
        burst_failed: Called with prompts whose shared forward has failed, before each is computed alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        costs: CostModel,
        stats: EngineCounters,
        progress: WorkInProgress,
        max_stall_s: float,
        clock: Callable[[], float],
        publish: Callable[[Published], None],
        failed: Callable[[Prompt, Exception], None],
        burst_failed: Callable[[Sequence[Prompt], Exception], None],
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._prefills = scheduler.prefills
        self._prefixes = prefixes
        self._costs = costs
        self._stats = stats
        self._progress = progress
        self._max_stall_s = max_stall_s
        self._clock = clock
        self._publish = publish
        self._failed = failed
        self._burst_failed = burst_failed

    def advance(self, prompt: Prompt, in_flight_s: float) -> bool:
        """Compute the next piece of a prompt: of its next image, or a chunk that ends at the next boundary.

        Chunks of several short prompts are computed in one forward.

        Args:
            prompt: The prompt.
            in_flight_s: Predicted seconds of decoding that the device computes first.

        Returns:
            Whether first tokens were published.
        """
        began_s, has_published = self._clock(), False
        can_wait = not self._scheduler.num_decoding and len(self._prefills.in_progress) == 1
        copy_s = self._max_stall_s if self._scheduler.num_decoding else math.inf
        if not self._begin(prompt, DISK_WAIT_S if can_wait else 0.0, copy_s):
            return False
        try:
            if prompt.row.spec.images and (image := self._runner.next_image(prompt.rows)) is not None:
                self._encode(prompt, image, began_s, in_flight_s)
            elif max_tokens := self._prefills.chunk_tokens(prompt):
                chunks = self._burst(PromptChunk(prompt.row, self._prefixes.clip(prompt, max_tokens)))
                has_published = self._compute(chunks, began_s, in_flight_s)
        except Exception as error:
            self._failed(prompt, error)
            return False
        return has_published

    def _begin(self, prompt: Prompt, wait_s: float = 0.0, copy_s: float = 0.0) -> bool:
        """Begin a prompt after its cached prefix, unless it has begun; see PrefixCache.begin.

        Returns:
            False if its first chunk must wait for the prefix, if it has returned to the queue, or if it has failed.
        """
        try:
            if self._prefixes.begin(prompt, wait_s, copy_s):
                return True
            prompt.is_waiting = True
        except MemoryTaken:
            self._scheduler.readmit(prompt)
        except Exception as error:
            self._failed(prompt, error)
        return False

    def _encode(self, prompt: Prompt, image: ImageLeft, began_s: float, in_flight_s: float) -> None:
        """Compute the next piece of an image; rows decode before the following piece."""
        if not (num_blocks := self._prefills.image_blocks(image)):
            return
        num_patches, share = image.num_patches, num_blocks / image.depth
        name = f"a piece of an image of {num_patches} patches ({num_blocks} of {image.depth} blocks)"
        shape = "image", num_patches.bit_length()
        self._progress.begin(name, self._costs.image_s(num_patches, share), shape, prompt.rows)
        piece_began_s = self._clock()
        self._runner.encode(prompt.rows, num_blocks)
        device_s = self._device_s(piece_began_s, in_flight_s)
        self._prefills.record_image(prompt, image, num_blocks, self._clock() - began_s, device_s)

    def _compute(self, chunks: Sequence[PromptChunk], began_s: float, in_flight_s: float) -> bool:
        """Compute the next chunk of a prompt, or chunks of several in one forward.

        First tokens are published before the snapshots of their prompts are taken, which need some milliseconds each.

        Returns:
            Whether there were any.
        """
        num_tokens = max(chunk.num_tokens for chunk in chunks)
        start = max(chunk.prompt.num_prefilled for chunk in chunks)
        name = f"a chunk of {num_tokens} tokens" if len(chunks) == 1 else f"{len(chunks)} chunks of {num_tokens} tokens"
        predicted_s = self._costs.chunk_s(num_tokens, start, len(chunks))
        shape = "prefill", len(chunks), num_tokens.bit_length()
        self._progress.begin(f"{name} at position {start}", predicted_s, shape, (chunk.row for chunk in chunks))
        chunk_began_s = self._clock()
        if not (outputs := self._forward(chunks)):
            return False
        device_s = self._device_s(chunk_began_s, in_flight_s)
        prompts = [chunk.prompt for chunk in chunks]
        self._prefills.note(chunks, self._clock() - began_s)
        published = Published()
        for prompt, output in zip(prompts, outputs, strict=True):
            published |= self._scheduler.update_prefill(prompt, output)
        if published:
            self._publish(published)
        for prompt, output in zip(prompts, outputs, strict=True):
            self._prefixes.take_at_boundaries(prompt)
            if output.first is not None:
                self._prefixes.end(prompt)
        self._stats.num_bursts += len(chunks) > 1
        self._prefills.record(chunks, self._clock() - began_s, device_s)
        return bool(published)

    def _device_s(self, began_s: float, in_flight_s: float) -> float:
        """Return the seconds since `began_s`, less those of the decode step that the device computed first."""
        seconds = self._clock() - began_s
        return max(seconds - in_flight_s, MIN_CHUNK_PART * seconds)

    def _forward(self, chunks: Sequence[PromptChunk]) -> Sequence[PrefillOutput]:
        """Compute the chunks.

        If a shared forward fails, nothing is returned, and each prompt is computed alone in the next steps.
        """
        if len(chunks) == 1:
            return [self._runner.prefill(chunks[0].row.prompt.rows, chunks[0].num_tokens)]
        try:
            return self._runner.prefill_burst(chunks)
        except Exception as error:
            self._burst_failed([chunk.prompt for chunk in chunks], error)
            return ()

    def _burst(self, first: PromptChunk) -> Sequence[PromptChunk]:
        """Begin other short prompts, and choose the chunks to compute in one forward with the first."""
        prompt = first.prompt
        if first.num_tokens < self._prefixes.clip(prompt, prompt.num_left):
            return [first]
        others = [
            PromptChunk(other.row, self._prefixes.clip(other, other.num_left))
            for other in self._prefills.companions(first)
            if self._prefills.source_of(other) is None and self._begin(other)
        ]
        return self._prefills.burst(first, others) if others else [first]
