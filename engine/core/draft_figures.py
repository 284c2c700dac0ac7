"""Acceptance of draft tokens by depth. Pure."""

ASSUMED_ACCEPTANCE, DEPTH_DECAY = 0.8, 0.9
"""Prior acceptance of the first draft token, and the factor from each depth to the next. Heads of released models
reach 0.7 to 0.9 at the first draft (DeepSeek-V3 report, arXiv 2412.19437: 0.85 to 0.90), and less where a head reads
its own output."""
ASSUMED_ROWS = 4.0
"""Weight of the prior, in row-rounds."""
ACCEPTANCE_ROWS = 128
"""Row-rounds over which acceptance is averaged; with many rows, 8 rounds."""
RECENT_ROWS, MAX_CHANGE = 12, 0.35
"""When the average over RECENT_ROWS row-rounds differs from the long one by more than MAX_CHANGE, the text has changed
and the long average is reset to it."""
UNSEEN_STEPS = 512
"""After this many steps without drafts of a depth, its measurements have half their weight."""


class AcceptanceRates:
    """The acceptance rate at each depth, given that all shallower drafts were accepted.

    It is an average over all rows of all batches.
    """

    def __init__(self, max_draft_tokens: int):
        self._mean: list[float | None] = [None] * max_draft_tokens
        self._recent = [0.0] * max_draft_tokens
        self._weight = [0.0] * max_draft_tokens
        self._unseen = [0] * max_draft_tokens  # steps

    @property
    def by_depth(self) -> list[float | None]:
        """Measured rates; None where nothing was drafted."""
        return list(self._mean)

    def record(self, num_drafted: int, num_accepted: list[int]) -> None:
        """Learn from one round.

        Args:
            num_drafted: Draft tokens per row.
            num_accepted: Accepted draft tokens of each row.
        """
        for depth in range(len(self._mean)):
            reached = sum(n >= depth for n in num_accepted) if depth < num_drafted else 0
            if reached:
                self._add(depth, sum(n > depth for n in num_accepted) / reached, reached)
            else:
                self._unseen[depth] += 1

    def expected_tokens(self, optimistic_beyond: int | None = None) -> list[float]:
        """Return the expected tokens per row and step with 0, 1, 2, ... drafts.

        Args:
            optimistic_beyond: Number of drafts; acceptance at deeper ones is estimated optimistically, within what was
                measured. None: nowhere.
        """
        expected, before, all_hold = [1.0], ASSUMED_ACCEPTANCE / DEPTH_DECAY, 1.0
        for depth, mean in enumerate(self._mean):
            is_hoped = optimistic_beyond is not None and depth >= optimistic_beyond
            assumed = 1.0 if is_hoped else DEPTH_DECAY * before
            weight = self._worth(depth) if is_hoped else self._weight[depth]
            before = (weight * (mean or 0.0) + ASSUMED_ROWS * assumed) / (weight + ASSUMED_ROWS)
            all_hold *= before
            expected.append(expected[-1] + all_hold)
        return expected

    def _worth(self, depth: int) -> float:
        return self._weight[depth] / (1 + self._unseen[depth] / UNSEEN_STEPS)

    def _add(self, depth: int, new: float, num_rows: int) -> None:
        before, weight = self._mean[depth], min(self._worth(depth), max(ACCEPTANCE_ROWS, 8 * num_rows))
        mean = new if before is None else before + (new - before) * num_rows / (weight + num_rows)
        recent = self._recent[depth] + (new - self._recent[depth]) * num_rows / (min(weight, RECENT_ROWS) + num_rows)
        if abs(recent - mean) > MAX_CHANGE:
            mean, weight = recent, RECENT_ROWS
        self._mean[depth], self._recent[depth] = mean, recent
        self._weight[depth], self._unseen[depth] = weight + num_rows, 0
