"""What rows, prompts and pictures cost in bytes. Pure."""

from dataclasses import dataclass

from engine.core.request import Request


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes, measured at the start where no formula holds on every device (worker/memory_costs.py).

    base_bytes: weights, and all else that is there without any request. token_bytes: one slot of one row, in all
    attention layers, the MTP head's included; state_bytes: of a row, its recurrent states; layer_share: of a row, its
    largest layer: rectangles are rebuilt layer by layer. snapshot_slack: by which a snapshot's buffers may be larger
    than its arrays. slots_step: slots come in so many. overshoot: tokens that
    may be computed behind a row's last.
    row_step_bytes, slot_step_bytes: intermediate results of a decode step, per row, and per slot of a row.
    ranked_bytes, shaped_bytes: beyond that, of a row that asks for top_k, top_p or min_p; for anything else that
    changes its logits, or for logprobs.
    feed_bytes: of a token that the MTP head has not read yet, of which at most feed_tokens wait.
    chunk_bytes + token_step_bytes * tokens + pair_bytes * tokens * (the prompt up to its end): of a chunk of a prompt,
    where attention looks at no more than max_queries tokens at once.
    image_bytes + patch_bytes * patches + patch_pair_bytes * patches ** 2: of one picture; image_token_bytes: of one
    placeholder, as long as its prompt is taken in.
    """

    base_bytes: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    layer_share: float = 1.0
    snapshot_slack: int = 0
    slots_step: int = 1
    overshoot: int = 0
    row_step_bytes: int = 0
    slot_step_bytes: float = 0.0
    ranked_bytes: int = 0
    shaped_bytes: int = 0
    feed_bytes: int = 0
    feed_tokens: int = 0
    chunk_bytes: int = 0
    token_step_bytes: float = 0.0
    pair_bytes: float = 0.0
    max_queries: int = 2**31
    image_bytes: int = 0
    patch_bytes: float = 0.0
    patch_pair_bytes: float = 0.0
    image_token_bytes: int = 0

    def slots(self, num_tokens: int) -> int:
        return -(-num_tokens // self.slots_step) * self.slots_step

    def rows(self, num_rows: int, slots: int) -> int:
        """A rectangle, and what its rows need in a step."""
        per_slot = self.token_bytes + self.slot_step_bytes
        waiting = min(slots, self.feed_tokens) * self.feed_bytes
        return int(num_rows * (slots * per_slot + self.state_bytes + self.row_step_bytes + waiting))

    def sampling(self, row: Request) -> int:
        """What a row needs beyond others for what it asks of its logits."""
        p = row.sampling
        ranked = self.ranked_bytes if p.top_k or p.top_p < 1 or p.min_p else 0
        is_shaped = row.spec.grammar is not None or p.logit_bias or p.min_tokens or p.logprobs is not None
        penalized = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        return ranked + (self.shaped_bytes if is_shaped or penalized else 0)

    def layer(self, num_rows: int, slots: int) -> int:
        """The largest layer of a rectangle, which is there twice while it is rebuilt."""
        return int(num_rows * (slots * self.token_bytes + self.state_bytes) * self.layer_share)

    def prompt(self, num_tokens: int) -> int:
        """The cache of a prompt in progress."""
        return self.slots(num_tokens) * self.token_bytes + self.state_bytes

    def chunk(self, num_tokens: int, end: int) -> int:
        """The intermediate results of so many tokens of a prompt, the last of which is its `end`-th."""
        num_pairs = min(num_tokens, self.max_queries) * end
        return int(self.chunk_bytes + num_tokens * self.token_step_bytes + num_pairs * self.pair_bytes)

    def burst(self, num_rows: int, num_tokens: int, end: int) -> int:
        """The intermediate results of so many chunks in one forward, padded alike; `end` is that of the longest prompt.

        The states of one layer, and its keys and values, are there once more for all rows.
        """
        return num_rows * self.chunk(num_tokens, end) + 2 * self.layer(num_rows, self.slots(end))

    def image(self, num_patches: int) -> int:
        return int(self.image_bytes + num_patches * (self.patch_bytes + self.patch_pair_bytes * num_patches))
