"""Histograms and counters over the choices that the engine has served, for its metrics."""

from copy import copy
from dataclasses import dataclass, field
from functools import partial

from engine.core.row import Row
from engine.histogram import Histogram, steps_1_2_5
from engine.timeline import Decoded, Phase, Prefilled, Queued, RowTimeline

FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_COUNT_BOUNDS = steps_1_2_5(1_000_000)
CHOICE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
"""Buckets of vLLM 0.33, whose dashboards expect them."""


@dataclass(kw_only=True)
class RequestFigures:
    """Figures of finished choices, in seconds and tokens. Written by the device thread.

    Times of an HTTP request include those before the engine (EngineRequest.spent_s).
    """

    first_token_s: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_BOUNDS))
    """From the arrival to the first token, of answers that began in this engine."""
    between_tokens_s: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    """Between two publications of tokens of a choice."""
    per_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    """Per choice: its seconds after the first token, divided by its other tokens."""
    total_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    """From the arrival to the last token."""
    queue_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    prefill_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    decode_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    inference_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    """Prefill and decode."""
    compile_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    """Until the device thread had the request, of those with a grammar."""
    stalled_s: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS))
    """In which prompts of others were computed between the choice's steps."""
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BOUNDS))
    output_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BOUNDS))
    max_output_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BOUNDS))
    computed_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BOUNDS))
    """Prompt tokens that did not come from the prefix cache."""
    choices: Histogram = field(default_factory=partial(Histogram, CHOICE_BOUNDS))
    """Choices per request, counted with the first of them that ends."""
    preemptions: Histogram = field(default_factory=partial(Histogram, PREEMPTION_BOUNDS))
    step_tokens: Histogram = field(default_factory=partial(Histogram, STEP_TOKEN_BOUNDS))
    """Tokens of each step of the engine: computed ones of prompts and generated ones."""
    finished: dict[str, int] = field(default_factory=dict)
    """Choices by finish reason."""
    preempted: dict[str, int] = field(default_factory=dict)
    """Preempted rows by reason."""
    obstacles: dict[str, int] = field(default_factory=dict)
    """Choices that had to wait in the queue, by the reason why."""
    num_prompts: int = 0
    """Prompts whose first token was generated."""
    num_prompt_tokens: int = 0
    """Their tokens."""
    num_cached_tokens: int = 0
    """Their tokens from the prefix cache."""
    saved_s: float = 0.0
    """Predicted seconds of computing the cached tokens."""
    waited_s: float = 0.0
    """Seconds in the queue of choices for which a wait had been predicted."""
    expected_s: float = 0.0
    """The seconds that had been predicted for them."""

    def prompt_done(self, row: Row) -> None:
        """Count a prompt that has its first token."""
        self.num_prompts += 1
        self.num_prompt_tokens += len(row.spec.token_ids)
        self.num_cached_tokens += row.num_cached

    def ended(self, row: Row, timeline: RowTimeline) -> None:
        """Count a choice that has ended; times only of those with a complete answer."""
        reason = timeline.finish_reason
        self.finished[reason] = self.finished.get(reason, 0) + 1
        for phase in timeline.phases:
            self._count_phase(phase)
        if timeline.grammar_s is not None:
            self.compile_s.observe(timeline.grammar_s)
        if not timeline.is_complete:
            return
        if row.index == 0:
            self.choices.observe(row.spec.num_choices)
        self.total_s.observe(timeline.total_s)
        self.queue_s.observe(timeline.seconds_in(Queued))
        self.prefill_s.observe(timeline.seconds_in(Prefilled))
        self.decode_s.observe(timeline.seconds_in(Decoded))
        self.inference_s.observe(timeline.seconds_in(Prefilled, Decoded))
        self.stalled_s.observe(timeline.stalled_s)
        if timeline.wait_s is not None:
            self.first_token_s.observe(timeline.wait_s)
        if timeline.per_token_s is not None:
            self.per_token_s.observe(timeline.per_token_s)
        self.prompt_tokens.observe(timeline.num_prompt_tokens)
        self.computed_tokens.observe(timeline.num_computed)
        self.output_tokens.observe(timeline.num_resumed + timeline.num_tokens)
        self.max_output_tokens.observe(row.spec.num_output_tokens)
        self.preemptions.observe(timeline.num_preemptions)

    def snapshot(self) -> "RequestFigures":
        """Return a copy that no longer changes. Safe to call from any thread."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Histogram | dict):
                setattr(other, name, value.copy())
        return other

    def _count_phase(self, phase: Phase) -> None:
        if isinstance(phase, Prefilled):
            self.saved_s += phase.saved_s
        elif isinstance(phase, Queued):
            if phase.preempted_by is not None:
                self.preempted[phase.preempted_by] = self.preempted.get(phase.preempted_by, 0) + 1
            if phase.obstacle is not None:
                self.obstacles[phase.obstacle] = self.obstacles.get(phase.obstacle, 0) + 1
            if phase.expected_s is not None:
                self.waited_s += phase.seconds
                self.expected_s += phase.expected_s
