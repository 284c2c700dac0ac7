"""Memory costs of rows, prompts and images, in bytes. Pure."""

from dataclasses import dataclass

from engine.core.row import Row


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes, measured at start where no formula holds on every device (worker/memory_costs.py)."""

    base_bytes: int = 0  # Weights, and everything else allocated without any request.
    token_bytes: int = 0  # Per token of a row, over all attention layers, those of the model that drafts included.
    state_bytes: int = 0  # Recurrent states of a row, and windows that are smaller than the largest.
    window_bytes: int = 0  # Per slot of a row, over all layers with the largest sliding window.
    window_slots: int = 0  # The most slots of such a layer.
    layer_share: float = 1.0  # Largest layer's share of a row: decode groups are rebuilt layer by layer.
    snapshot_slack: int = 0  # By how much the buffers of a snapshot, or of a decode group, may exceed their arrays.
    max_snapshots: int = 2**31  # Snapshots whose arrays may exist at once; Metal allows a process so many buffers.
    unpacked_bytes: float = 0.0
    """Per slot, for the keys and values of one layer as computed, if they are stored with fewer bits; the largest."""
    slots_step: int = 1  # Slots are allocated in multiples of this number.
    overshoot: int = 0  # Tokens that may be computed after a row's last one.
    row_step_bytes: int = 0  # Intermediate results of a decode step, per row.
    slot_step_bytes: float = 0.0  # Intermediate results of a decode step, per slot of a row.
    ranked_bytes: int = 0  # Additional bytes of a row that uses top_k, top_p or min_p.
    shaped_bytes: int = 0  # Additional bytes of a row with penalties, biases, min_tokens, a grammar or logprobs.
    pending_bytes: int = 0  # Per token that the model that drafts has not read yet.
    pending_tokens: int = 0  # The most tokens per row that the model that drafts has not read yet.
    chunk_bytes: int = 0  # Intermediate results of a prefill chunk, whatever its size.
    token_step_bytes: float = 0.0  # Intermediate results of a prefill chunk, per token.
    pair_bytes: float = 0.0
    """Intermediate results of a prefill chunk, per query and token of the prompt up to the chunk's end."""
    max_queries: int = 2**31  # The most queries that attention computes at once.
    image_bytes: int = 0  # Encoding one image, whatever its size.
    patch_bytes: float = 0.0  # Encoding one image, per patch.
    patch_pair_bytes: float = 0.0  # Encoding one image, per patch squared.
    image_token_bytes: int = 0  # Features of an image, per placeholder token, during prefill.
    image_patch_bytes: int = 0  # Hidden states of an image between two of its pieces, per patch, during prefill.

    def slots(self, num_tokens: int) -> int:
        """Round a number of tokens up to allocated slots."""
        return -(-num_tokens // self.slots_step) * self.slots_step

    def fixed(self, num_slots: int | None = None) -> int:
        """Return the bytes of a row that do not grow with its length: recurrent states, and windows once they are full.

        Args:
            num_slots: The row's slots, if its windows may not be full yet.
        """
        slots = self.window_slots if num_slots is None else min(num_slots, self.window_slots)
        return self.state_bytes + slots * self.window_bytes

    def rows(self, num_rows: int, slots: int) -> int:
        """Return the bytes of a decode group of `num_rows` rows, including the intermediate results of a step."""
        per_slot = self.token_bytes + self.slot_step_bytes + self.unpacked_bytes
        waiting = min(slots, self.pending_tokens) * self.pending_bytes
        rows = num_rows * (slots * per_slot + self.fixed(slots) + self.row_step_bytes + waiting)
        return int(rows) + (self.snapshot_slack if num_rows else 0)

    def sampling(self, row: Row) -> int:
        """Return the additional bytes of a row for its sampling parameters."""
        p = row.sampling
        ranked = self.ranked_bytes if p.top_k or p.top_p < 1 or p.min_p else 0
        is_shaped = row.spec.grammar is not None or p.logit_bias or p.min_tokens or p.logprobs is not None
        penalized = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        return ranked + (self.shaped_bytes if is_shaped or penalized else 0)

    def layer(self, num_rows: int, slots: int) -> int:
        """Return the bytes of a decode group's largest layer, which exists twice while it is rebuilt."""
        return int(num_rows * (slots * self.token_bytes + self.fixed(slots)) * self.layer_share)

    def prompt(self, num_tokens: int) -> int:
        """Return the bytes of the cache of a prompt in progress."""
        slots = self.slots(num_tokens)
        return slots * self.token_bytes + self.fixed(slots)

    def snapshot(self, num_tokens: int) -> int:
        """Return the bytes of a snapshot whose own KV segment has `num_tokens` tokens."""
        return num_tokens * self.token_bytes + self.fixed()

    def chunk(self, num_tokens: int, end: int) -> int:
        """Return the bytes of intermediate results of `num_tokens` prompt tokens, the last of which is the `end`-th."""
        num_pairs = min(num_tokens, self.max_queries) * end
        per_token = num_tokens * self.token_step_bytes + end * self.unpacked_bytes
        return int(self.chunk_bytes + per_token + num_pairs * self.pair_bytes)

    def burst(self, num_rows: int, num_tokens: int, end: int) -> int:
        """Return the bytes of intermediate results of a forward of `num_rows` chunks, padded to `num_tokens` each.

        What does not grow with a chunk, such as expanded weights, exists once; each further row has new states and
        logits, as in a decode step. One layer's keys, values and states exist once more for all rows.

        Args:
            num_rows: Chunks.
            num_tokens: Tokens of the longest chunk.
            end: Prompt tokens up to the end of the chunk, of the longest prompt.
        """
        further = min(self.chunk_bytes, self.state_bytes + self.row_step_bytes)
        chunks = num_rows * (self.chunk(num_tokens, end) - self.chunk_bytes)
        return self.chunk_bytes + (num_rows - 1) * further + chunks + 2 * self.layer(num_rows, self.slots(end))

    def image(self, num_patches: int) -> int:
        """Return the bytes of encoding one image."""
        return int(self.image_bytes + num_patches * (self.patch_bytes + self.patch_pair_bytes * num_patches))

    def kept_image(self, num_patches: int, num_tokens: int) -> int:
        """Return the bytes that an image keeps during prefill, between its pieces and then as features.

        The two are counted apart: crops that overlap have more patches per token than those that do not.
        """
        return num_patches * self.image_patch_bytes + num_tokens * self.image_token_bytes
