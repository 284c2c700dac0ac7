"""What drafts have been seen to gain and to cost: acceptance by depth, seconds by size of the batch."""

from collections import deque
from statistics import median_low

ACCEPTANCE_ROWS = 64
"""Row-rounds over which acceptance is averaged; with many rows, 8 rounds."""
RENEWED_ROWS = 4.0
"""So many row-rounds is worth, when a trial begins, what was seen before it."""
ASSUMED_ACCEPTANCE = 0.8
"""Of the first draft before anything is known; an unknown deeper draft holds as often as the one before it."""
ASSUMED_ROWS = 1.0
"""So many row-rounds is that worth when the first ones come."""
ASSUMED_DRAFT_COST = 0.1
"""What one more draft adds to a step before that is measured, in plain steps."""

TIMES_KEPT = 16
SHORTEST_S = 1e-9  # a clock may stand still


class Acceptance:
    """How often the draft at each depth holds, given that those before it did."""

    def __init__(self, max_draft_tokens: int):
        self._mean: list[float | None] = [None] * max_draft_tokens
        self._weight = [0.0] * max_draft_tokens

    @property
    def by_depth(self) -> list[float | None]:
        return list(self._mean)

    def record(self, num_drafted: int, num_accepted: list[int]) -> None:
        """One round: num_accepted of num_drafted tokens in each row."""
        for depth in range(num_drafted):
            reached = sum(n >= depth for n in num_accepted)
            if reached:
                self._add(depth, sum(n > depth for n in num_accepted) / reached, reached)

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Per row and step."""
        expected, all_hold, assumed = 1.0, 1.0, ASSUMED_ACCEPTANCE
        for mean in self._mean[:num_draft_tokens]:
            assumed = assumed if mean is None else mean
            all_hold *= assumed
            expected += all_hold
        return expected

    def renew_beyond(self, num_draft_tokens: int) -> None:
        """What comes now of deeper drafts counts more than what was seen before."""
        deeper = self._weight[num_draft_tokens:]
        self._weight[num_draft_tokens:] = [min(weight, RENEWED_ROWS) for weight in deeper]

    def forget_beyond(self, num_draft_tokens: int) -> None:
        """Deeper drafts are unknown again: what they depend on has changed meanwhile, or may have."""
        self._mean[num_draft_tokens:] = [None] * (len(self._mean) - num_draft_tokens)

    def _add(self, depth: int, new: float, num_rows: int) -> None:
        before = self._mean[depth]
        if before is None:
            known = [mean for mean in self._mean[:depth] if mean is not None]
            before, self._weight[depth] = known[-1] if known else ASSUMED_ACCEPTANCE, ASSUMED_ROWS
        weight = min(self._weight[depth], max(ACCEPTANCE_ROWS, 8 * num_rows))
        self._mean[depth] = before + (new - before) * num_rows / (weight + num_rows)
        self._weight[depth] = weight + num_rows


class StepTimes:
    """Seconds of a step, by size of the batch (1, 2, 3-4, 5-8, 9-16, ... rows) and number of drafts k.

    Medians of the last ones: steps that waited for something else do not move them.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[tuple[int, int], float] = {}

    @staticmethod
    def size_of(num_rows: int) -> int:
        """0, 1, 2, ... for 1, 2, 3-4, ... rows."""
        return (num_rows - 1).bit_length()

    def add(self, size: int, k: int, seconds: float) -> None:
        self.replace(size, k, [*self._times.get((size, k), ()), seconds])

    def replace(self, size: int, k: int, seconds: list[float]) -> None:
        times = self._times[size, k] = deque([max(s, SHORTEST_S) for s in seconds], TIMES_KEPT)
        self._medians[size, k] = median_low(times)

    def count(self, size: int, k: int) -> int:
        return len(self._times.get((size, k), ()))

    def hoped_for(self, size: int, k: int) -> float:
        """As measured. Else what may be hoped for, given plain steps of this size: that the step is as much longer as
        at the nearest size where it was measured, or that drafts cost little; never more than their share of a step
        with more of them."""
        if (size, k) in self._medians:
            return self._medians[size, k]
        plain = self._medians[size, 0]
        more = [drafts for near, drafts in self._medians if near == size and drafts > k]
        if more:
            return plain + (self._medians[size, min(more)] - plain) * k / min(more)
        if k > 1 and (size, k - 1) in self._medians:
            return self._medians[size, k - 1] + ASSUMED_DRAFT_COST * plain
        known = [near for near, drafts in self._medians if drafts == k and (near, 0) in self._medians]
        if known:
            near = min(known, key=lambda near: abs(near - size))
            return plain * self._medians[near, k] / self._medians[near, 0]
        return plain * (1 + ASSUMED_DRAFT_COST * k)

    def status_ms(self) -> dict[str, dict[str, float]]:
        """{rows: {drafts: milliseconds}}."""
        status: dict[str, dict[str, float]] = {}
        for (size, k), seconds in sorted(self._medians.items()):
            status.setdefault(_size_name(size), {})[str(k)] = round(1000 * seconds, 3)
        return status


def _size_name(size: int) -> str:
    return str(size + 1) if size < 2 else f"{2 ** (size - 1) + 1}-{2**size}"
