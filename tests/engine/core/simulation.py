"""A device in synthetic time: the speculation controller against step times and acceptance that are known."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.core.cost_model import CostModel
from engine.core.runner import PLAIN, Drafts, RowOutput, StepTime
from engine.core.speculation import SpeculationController

MTP = tuple(Drafts(k) for k in (1, 2, 3))

Seconds = Callable[[int, int], float]
"""(rows, drafts) -> seconds of a step."""


def measured(milliseconds: Mapping[int, Sequence[float]]) -> Seconds:
    """Interpolate steps that were measured: rows -> milliseconds with 0, 1, 2, ... drafts."""
    sizes = sorted(milliseconds)

    def seconds(num_rows: int, num_drafts: int) -> float:
        return float(np.interp(num_rows, sizes, [milliseconds[size][num_drafts] for size in sizes])) / 1000

    return seconds


CPU = measured(
    {
        1: (12.9, 18.1, 22.3, 24.4),
        2: (12.2, 18.3, 24.5, 28.0),
        4: (13.5, 20.2, 27.0, 32.3),
        8: (19.7, 28.4, 39.2, 46.9),
        16: (24.7, 40.4, 57.5, 70.8),
    }
)
"""The demo model on two x86 cores."""

BUSY_CPU = measured(
    {1: (6.6, 8.6, 10.4, 12), 2: (8, 11, 14, 17), 4: (12, 18, 25, 32), 8: (22, 33, 45, 57), 16: (38, 58, 78, 98)}
)
"""The same where one row is cheap and many are dear."""

GPU = measured({1: (8.6, 14.1, 15.4, 15.5), 4: (10.1, 14.7, 14.7, 14.8), 16: (9.8, 14.2, 14.9, 15.9)})
"""A 4B model on an H200 with a slow host."""


def never_pays(num_rows: int, num_drafts: int) -> float:
    return 0.01 * (1 + 0.03 * num_rows) * (1 + 0.9 * num_drafts + 0.05 * num_drafts * num_rows)


def pays_for_two_rows(num_rows: int, num_drafts: int) -> float:
    """Verification reads the weights once per row from the third row on."""
    verification = num_drafts > 0 and num_rows > 2
    return 0.02 * (1 + 0.02 * num_rows + 0.2 * num_drafts + 0.7 * num_rows * verification)


def verifies_row_by_row(num_rows: int, num_drafts: int) -> float:
    return 0.02 * (num_rows * (1 + 0.1 * num_drafts) if num_drafts else 1)


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
        self.costs = CostModel(MTP, self._warm_up() if seeded else ())
        self.controller = SpeculationController({"mtp": "auto"}, self.costs, {})

    def run(self, num_tokens: float, num_rows: int = 1) -> float:
        """Until every row has got so many tokens. Returns tokens per second and row."""
        began_s, got = self.elapsed_s, 0.0
        while got < num_tokens:
            k = self.controller.choose(num_rows).num_tokens
            seconds, outputs = self._in_flight or self._launch(k, num_rows)
            self._in_flight = self._launch(k, num_rows)
            self.elapsed_s += seconds
            new = sum(len(output.token_ids) for output in outputs) / len(outputs)
            got += new
            self.costs.record_step(num_rows, Drafts(k), new, seconds * self._distortion())
            self.controller.record(outputs)
            self.drafts.append(k)
        return got / (self.elapsed_s - began_s)

    def _warm_up(self) -> list[StepTime]:
        return [
            StepTime(num_rows, Drafts(k), sorted(self.seconds(num_rows, k) * self._distortion() for _ in range(3))[1])
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


LOOKUP = tuple(Drafts(k, "prompt_lookup", is_selective=True) for k in (2, 4, 8))


class LookupSimulation(Simulation):
    """The same device with prompt lookup beside the head: a step with it costs what one with the head's drafts does.

    Rows have a match in `copied` tokens out of every `period`, where they accept a draft with probability `accepted`. A
    step for which nothing matches is plain, and takes `search` of its time longer.
    """

    def __init__(self, seconds: Seconds, *, copied: int, period: int, accepted: float = 0.95, head: bool = False):
        self.copied, self.period, self.accepted, self.search = copied, period, accepted, 0.02
        self._positions: list[float] = []
        super().__init__(seconds, (0.8, 0.7, 0.6) if head else (), noise=0.05)
        choices = (*(MTP if head else ()), *LOOKUP)
        times = [StepTime(n, d, seconds(n, d.num_tokens)) for n in (1, 2, 8) for d in (PLAIN, *choices)]
        self.costs = CostModel(choices, times)
        self.controller = SpeculationController({"mtp": "auto", "prompt_lookup": "auto"}, self.costs, {})

    def run(self, num_tokens: float, num_rows: int = 1) -> float:
        """Decode until every row has got so many tokens. Returns tokens per second and row."""
        self._positions = [self._random.random() * self.period for _ in range(num_rows)]
        began_s, got = self.elapsed_s, 0.0
        while got < num_tokens:
            drafts = self.controller.choose(num_rows)
            outputs = [self._row(i, drafts) for i in range(num_rows)]
            used = drafts if any(output.num_drafted for output in outputs) else PLAIN
            seconds = self.seconds(num_rows, used.num_tokens)
            seconds *= 1 + self.search * (drafts.proposer == "prompt_lookup")
            self.elapsed_s += seconds
            new = sum(len(output.token_ids) for output in outputs) / num_rows
            got += new
            self.costs.record_step(num_rows, drafts, new, seconds * self._distortion() if used == drafts else None)
            self.controller.record(outputs)
            self.drafts.append(drafts.num_tokens)
        return got / (self.elapsed_s - began_s)

    def _row(self, i: int, drafts: Drafts) -> RowOutput:
        matches = self._positions[i] % self.period < self.copied
        acceptance = (self.accepted,) * 8 if drafts.proposer == "prompt_lookup" else self.acceptance
        most = drafts.num_tokens if drafts.proposer == "mtp" or matches else 0
        num_accepted = 0
        while num_accepted < most and self._random.random() < acceptance[num_accepted]:
            num_accepted += 1
        self._positions[i] += num_accepted + 1
        can_draft = frozenset(["prompt_lookup"] if self._positions[i] % self.period < self.copied else [])
        return RowOutput((7,) * (num_accepted + 1), (), most, num_accepted, drafts.proposer, can_draft)


class HeadsSimulation(Simulation):
    """The same device with several heads, each with step times and an acceptance of its own, by proposer.

    Plain steps take what they do with the first head.
    """

    def __init__(self, heads: Mapping[str, tuple[Seconds, tuple[float, ...]]], noise: float = 0.0, seed: int = 0):
        self.heads = dict(heads)
        super().__init__(*self.heads[PLAIN.proposer], noise, seed=seed)
        self.used: list[Drafts] = []
        choices = [Drafts(k, name) for name in heads for k in (1, 2, 3)]
        times = [
            StepTime(n, one, self._step_s(n, one) * self._distortion()) for n in (1, 2, 8) for one in (PLAIN, *choices)
        ]
        self.costs = CostModel(choices, times)
        self.controller = SpeculationController({"mtp": "auto"}, self.costs, {})

    def run(self, num_tokens: float, num_rows: int = 1) -> float:
        """Decode until every row has got so many tokens. Returns tokens per second and row."""
        began_s, got = self.elapsed_s, 0.0
        while got < num_tokens:
            drafts = self.controller.choose(num_rows)
            self.acceptance = self.heads[drafts.proposer][1]
            outputs = [replace(self._output(drafts.num_tokens), proposer=drafts.proposer) for _ in range(num_rows)]
            seconds = self._step_s(num_rows, drafts)
            self.elapsed_s += seconds
            new = sum(len(output.token_ids) for output in outputs) / num_rows
            got += new
            self.costs.record_step(num_rows, drafts, new, seconds * self._distortion())
            self.controller.record(outputs)
            self.used.append(drafts)
        return got / (self.elapsed_s - began_s)

    def _step_s(self, num_rows: int, drafts: Drafts) -> float:
        return self.heads[drafts.proposer][0](num_rows, drafts.num_tokens)
