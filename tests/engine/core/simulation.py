"""A device in synthetic time: the speculation controller against step times and acceptance that are known."""

import random
from collections.abc import Callable

from engine.core.batch import RowOutput, StepTime
from engine.core.cost_model import CostModel
from engine.core.speculation import SpeculationController

Seconds = Callable[[int, int], float]
"""(rows, drafts) -> seconds of a step."""


def expected_tokens(acceptance: tuple[float, ...], k: int) -> float:
    expected = all_hold = 1.0
    for each in acceptance[:k]:
        all_hold *= each
        expected += all_hold
    return expected


def best_rate(seconds: Seconds, acceptance: tuple[float, ...], num_rows: int = 1) -> float:
    """Tokens per second and row of the best k for this one situation."""
    return max(expected_tokens(acceptance, k) / seconds(num_rows, k) for k in range(4))


class Simulation:
    """Outputs come one call after the one that started them, and a call lasts as long as that step.

    noise: of the times that the controller sees, sigma of a lognormal; spikes: how many of them are ten times as long.
    seeded: there was a warm-up, which measured steps of 1, 2 and 8 rows with the same noise.
    The score is of the true times, so that luck with the noise is none.
    """

    def __init__(
        self,
        seconds: Seconds,
        acceptance: tuple[float, ...],
        noise: float = 0.0,
        spikes: float = 0.0,
        seed: int = 0,
        seeded: bool = True,
    ):
        self.seconds, self.acceptance = seconds, acceptance
        self.elapsed_s = 0.0
        self.drafts: list[int] = []
        self._noise, self._spikes = noise, spikes
        self._random = random.Random(seed)
        self._in_flight: tuple[float, list[RowOutput]] | None = None
        self.costs = CostModel(3, self._warm_up() if seeded else ())
        self.controller = SpeculationController("auto", 3, self.costs)

    def run(self, num_tokens: float, num_rows: int = 1) -> float:
        """Until every row has got so many tokens. Returns tokens per second and row."""
        began_s, got = self.elapsed_s, 0.0
        while got < num_tokens:
            k = self.controller.num_draft_tokens(num_rows)
            seconds, outputs = self._in_flight or self._launch(k, num_rows)
            self._in_flight = self._launch(k, num_rows)
            self.elapsed_s += seconds
            new = sum(len(output.token_ids) for output in outputs) / len(outputs)
            got += new
            self.costs.record_step(num_rows, k, new, seconds * self._distortion())
            self.controller.record(outputs)
            self.drafts.append(k)
        return got / (self.elapsed_s - began_s)

    def _warm_up(self) -> list[StepTime]:
        return [
            StepTime(num_rows, k, sorted(self.seconds(num_rows, k) * self._distortion() for _ in range(3))[1])
            for num_rows in (1, 2, 8)
            for k in range(4)
        ]

    def _launch(self, k: int, num_rows: int) -> tuple[float, list[RowOutput]]:
        return self.seconds(num_rows, k), [self._output(k) for _ in range(num_rows)]

    def _output(self, k: int) -> RowOutput:
        num_accepted = 0
        while num_accepted < k and self._random.random() < self.acceptance[num_accepted]:
            num_accepted += 1
        return RowOutput((7,) * (num_accepted + 1), (), k, num_accepted)

    def _distortion(self) -> float:
        spike = 10.0 if self._random.random() < self._spikes else 1.0
        return spike * self._random.lognormvariate(0, self._noise)
