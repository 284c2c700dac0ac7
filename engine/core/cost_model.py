"""CostModel: how long chunks of prompts and decode steps take on this machine, learned from each of them.

The scheduler, the prefix cache and the draft controller decide by it. The sparse-prefill scorer has a model of its own
(core/spec_prefill/pace.py).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.core.least_squares import fit_non_negative
from engine.core.runner import PLAIN, ChunkTime, Drafts, StepTime
from engine.core.step_costs import StepCosts
from engine.protocol import PrefillCost

WINDOW = 32
"""Number of the newest measurements that a fit uses."""

REFIT_ERROR, REFIT_PERIOD = 0.03, 8
"""The fit is renewed when a measurement deviates from it by this share, or after this many measurements."""

TOKENS_WEIGHT = 0.1
"""Weight of a new step in the moving average of its tokens per row."""

MIN_ATTENTION_TOKENS = 2048
"""Attention is fitted once a token of a measured chunk has on average this many tokens before it. Earlier it takes too
little of the time to be told from noise, and what short chunks leave open would count a thousandfold in long
prompts."""

BUSY_TOKENS, BUSY_RATIO = 256, 2.0
"""See CostModel.busy_tokens. On an H200 a chunk of 192 tokens of 35B-A3B takes 45 ms, and one of 2,048 takes 110."""

GUESSED_S_PER_TOKEN = GUESSED_S_PER_PATCH = 1e-3
"""Seconds per prompt token, and per patch of an image, before anything is measured."""


class LearnedCost:
    """Seconds as a linear function of features, fitted to the newest measurements.

    Weighted least squares on the relative error: a measurement that includes waiting for other work hardly changes it.

    Args:
        guess: Coefficients before anything is measured.
        is_warm: Whether the first measurement counts. Otherwise later ones replace it, because it may include
            compilation.
        min_ratio: The last coefficient is fitted only while the last feature of some measurement is at least this many
            times the one before it; else it stays as it is.
    """

    def __init__(self, guess: Sequence[float], is_warm: bool = False, min_ratio: float = 0.0):
        self.coefficients = np.array(guess)
        self._min_ratio = min_ratio
        self._rows: deque[np.ndarray] = deque(maxlen=WINDOW)  # features divided by seconds
        self._num_recorded = 0
        self._num_cold = 0 if is_warm else 1

    @property
    def is_measured(self) -> bool:
        return bool(self._rows)

    def seconds(self, features: np.ndarray) -> float:
        """Predict the seconds of work with these features."""
        return float(self.coefficients @ features)

    def record(self, features: np.ndarray, seconds: float) -> None:
        """Learn from a measurement."""
        if self._num_recorded == self._num_cold:
            self._rows.clear()
        self._num_recorded += 1
        self._rows.append(features / seconds)
        differs = abs(self.seconds(self._rows[-1]) - 1.0) > REFIT_ERROR
        if differs or self._num_recorded % REFIT_PERIOD == 0:
            self._fit(np.array(self._rows))

    def _fit(self, rows: np.ndarray) -> None:
        """Fit the coefficients; what the newest measurements leave open stays as earlier ones have shown it."""
        prior = self.coefficients if len(rows) > 1 else np.zeros_like(self.coefficients)
        if (rows[:, -1] >= self._min_ratio * rows[:, -2]).any():
            self.coefficients = fit_non_negative(rows, prior=prior)
        else:
            others = fit_non_negative(rows[:, :-1], rows[:, -1] * prior[-1], prior[:-1])
            self.coefficients = np.append(others, prior[-1])


GUESSED_READ_BYTES_PER_S, GUESSED_READ_BYTES = 1e9, 2.0**26
"""Assumed rate of reading from disk before anything is measured, and the bytes that the assumption weighs."""

GUESSED_FETCH_BYTES_PER_S = 1e8
"""Assumed rate of fetching from another node before anything is measured: somewhat less than gigabit Ethernet."""

FADING = 0.9
"""Factor by which earlier reads and fetches lose weight with each new one."""

MAX_PEERS = 256
"""Nodes whose rates are remembered; the one that was measured first is forgotten first."""


class LearnedRate:
    """Bytes per second, from fading sums over the measurements.

    Args:
        guess: Bytes per second before anything is measured; it weighs GUESSED_READ_BYTES.
    """

    def __init__(self, guess: float):
        self._bytes, self._seconds = GUESSED_READ_BYTES, GUESSED_READ_BYTES / guess

    def record(self, num_bytes: int, seconds: float) -> None:
        """Learn from a measurement."""
        self._bytes, self._seconds = FADING * self._bytes + num_bytes, FADING * self._seconds + seconds

    def seconds(self, num_bytes: int) -> float:
        """Predict the seconds of `num_bytes`."""
        return num_bytes * self._seconds / self._bytes


class CostModel:
    """Predicts the seconds of prefill, image encoding, decode steps and reads from disk.

    A chunk of n tokens after p others takes a + b * n + c * n * (p + n / 2) seconds: the fixed part of a forward,
    matrix products, and attention. An image of n patches takes d + e * n + f * n * n seconds, each block of the vision
    tower an equal share. `steps` predicts decode steps. Prefill and decode start with measurements from warm-up.

    Args:
        drafts: The ways to draft.
        step_times: Decode steps measured at warm-up.
        chunk_times: Prompt chunks measured at warm-up.
    """

    def __init__(
        self,
        drafts: Sequence[Drafts] = (),
        step_times: Sequence[StepTime] = (),
        chunk_times: Sequence[ChunkTime] = (),
    ) -> None:
        self.steps = StepCosts(drafts, step_times)
        self._chunks = LearnedCost([0.0, GUESSED_S_PER_TOKEN, 0.0], bool(chunk_times), MIN_ATTENTION_TOKENS)
        self._images = LearnedCost([0.0, GUESSED_S_PER_PATCH, 0.0])
        self._reads = LearnedRate(GUESSED_READ_BYTES_PER_S)
        self._fetches: dict[str, LearnedRate] = {}  # by the address of the node
        self._step_shape = (0, PLAIN)  # of the last step
        self._tokens_per_row: dict[Drafts, float] = {}
        for chunk in chunk_times:
            self.record_chunk(chunk.num_tokens, 0, chunk.seconds)

    def record_read(self, num_bytes: int, seconds: float) -> None:
        """Learn from snapshots that were read from disk, including their copy to the device."""
        self._reads.record(num_bytes, seconds)

    def read_s(self, num_bytes: int) -> float:
        """Predict the seconds of reading snapshots of `num_bytes` from disk."""
        return self._reads.seconds(num_bytes)

    def record_fetch(self, address: str, num_bytes: int, seconds: float) -> None:
        """Learn from snapshots that were fetched from another node into the disk tier, also incomplete ones."""
        if address not in self._fetches and len(self._fetches) >= MAX_PEERS:
            del self._fetches[next(iter(self._fetches))]
        self._fetches.setdefault(address, LearnedRate(GUESSED_FETCH_BYTES_PER_S)).record(num_bytes, seconds)

    def forget_fetches(self, address: str) -> None:
        """Forget the rate of a node, so that it is measured again."""
        self._fetches.pop(address, None)

    def fetched_byte_s(self, address: str | None = None) -> float:
        """Predict the seconds per byte of fetching from a node and reading what was fetched.

        Args:
            address: The node; None: any node, at the mean pace of those that were measured.
        """
        rates = self._fetches.values() if address is None else filter(None, [self._fetches.get(address)])
        seconds = [rate.seconds(2**30) for rate in list(rates)] or [2**30 / GUESSED_FETCH_BYTES_PER_S]
        return (sum(seconds) / len(seconds) + self.read_s(2**30)) / 2**30

    @property
    def is_measured(self) -> bool:
        """Whether any chunk has been measured; before, predictions are guesses."""
        return self._chunks.is_measured

    @property
    def prefill(self) -> PrefillCost | None:
        """The fitted cost of prefill; None before any chunk was measured."""
        return PrefillCost(*self._chunks.coefficients.tolist()) if self.is_measured else None

    def record_chunk(self, num_tokens: int, start: int, seconds: float, num_rows: int = 1) -> None:
        """Learn from a chunk, or from `num_rows` chunks in one forward."""
        if num_tokens > 0 and seconds > 0:
            self._chunks.record(_features(num_tokens, start, num_rows), seconds)

    def record_image(self, num_patches: int, share: float, seconds: float) -> None:
        """Learn from a piece of an image. share: part of the vision tower's blocks that it computed."""
        if seconds > 0:
            self._images.record(share * _image_features(num_patches), seconds)

    def record_step(self, num_rows: int, drafts: Drafts, tokens_per_row: float, seconds: float | None) -> None:
        """Learn from a decode step.

        Args:
            num_rows: Rows that it decoded.
            drafts: Its drafts.
            tokens_per_row: Mean number of tokens that the rows got; 0 if none got any.
            seconds: Since the end of the step before; None where other work came between. The first step after a change
                of rows or drafts is ignored: the runner's pipeline mixes it with the step before.
        """
        is_settled, self._step_shape = self._step_shape == (num_rows, drafts), (num_rows, drafts)
        if not is_settled or not tokens_per_row:
            return
        before = self._tokens_per_row.get(drafts, tokens_per_row)
        self._tokens_per_row[drafts] = before + TOKENS_WEIGHT * (tokens_per_row - before)
        if seconds is not None:
            self.steps.record(num_rows, drafts, seconds)

    def chunk_s(self, num_tokens: int, start: int, num_rows: int = 1) -> float:
        """Predict the seconds of one chunk after `start` tokens, or of `num_rows` such chunks in one forward."""
        return self._chunks.seconds(_features(num_tokens, start, num_rows)) if num_tokens > 0 else 0.0

    def image_s(self, num_patches: int, share: float = 1.0) -> float:
        """Predict the seconds of an image, or of a share of the vision tower's blocks."""
        return share * self._images.seconds(_image_features(num_patches))

    def prompt_s(self, start: int, end: int, chunk_tokens: int = 2048) -> float:
        """Predict the seconds of a prompt's tokens `start` to `end` in chunks of `chunk_tokens`."""
        return PrefillCost(*self._chunks.coefficients.tolist()).prompt_s(start, end, chunk_tokens)

    def max_tokens(self, seconds: float, start: int) -> int:
        """Return how many tokens after `start` others fit into `seconds`; 0 if none does."""
        fixed, linear, pair = self._chunks.coefficients.tolist()
        per_token, left = linear + pair * start, seconds - fixed
        if left <= 0:
            return 0
        if pair <= 0:
            return int(left / max(per_token, 1e-12))
        return int((-per_token + (per_token**2 + 2 * pair * left) ** 0.5) / pair)

    def busy_tokens(self, limit: int | None) -> int:
        """Return the most prompt tokens of a step in which rows decode.

        Args:
            limit: The operator's; None: BUSY_TOKENS, or more if a chunk of them takes at most BUSY_RATIO times as long
                as one of a single token: on a fast device small chunks cost nearly as much as larger ones.
        """
        if limit is not None:
            return limit
        if not self.is_measured:
            return BUSY_TOKENS
        return max(BUSY_TOKENS, self.max_tokens(BUSY_RATIO * self.chunk_s(1, 0), 0))

    def step_s(self, num_rows: int, drafts: Drafts) -> float | None:
        """Predict the seconds of a decode step; None before a step was measured."""
        return self.steps.seconds_of(num_rows, drafts) if num_rows and self.steps.is_measured else None

    def token_s(self, num_rows: int) -> float | None:
        """Predict the seconds until each of `num_rows` rows has one more token, with the current drafts.

        Returns:
            None before a step was measured.
        """
        if not self.steps.is_measured:
            return None
        drafts = self._step_shape[1]
        return self.steps.seconds_of(max(num_rows, 1), drafts) / max(self._tokens_per_row.get(drafts, 1.0), 1.0)


def _features(num_tokens: int, start: int, num_rows: int = 1) -> np.ndarray:
    return np.array([1.0, num_rows * num_tokens, num_rows * num_tokens * (start + num_tokens / 2)])


def _image_features(num_patches: int) -> np.ndarray:
    return np.array([1.0, num_patches, float(num_patches) ** 2])
