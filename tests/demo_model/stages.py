"""The stages of the training, in one table.

The demo model was trained with these settings, on an H200 but for the short stages, which ran on two CPU cores. The
steps of the draft were not counted; the table has round numbers for its 510 s and 420 s. The first stage of both
models drew from an earlier version of the tasks: fewer rare strings, no requests to decline, stories without an end.
"""

import random
from dataclasses import dataclass

from tests.demo_model.model import DRAFT, PICO, ModelConfig
from tests.demo_model.tasks import mixes
from tests.demo_model.tasks.mixes import Mix

MIN_RATE = 0.01
"""Part of the learning rate below which it does not fall."""


@dataclass(frozen=True)
class Lengths:
    """Tokens per row with their probabilities, from a step on."""

    first_step: int
    shares: dict[int, float]


SHORT = (Lengths(0, {512: 1.0}),)
PICO_LENGTHS = (
    *SHORT,
    Lengths(400, {512: 0.85, 1024: 0.10, 2048: 0.05}),
    Lengths(1200, {512: 0.79, 1024: 0.05, 2048: 0.05, 4096: 0.05, 8192: 0.04, 16384: 0.02}),
)
IMAGE_LENGTHS = (Lengths(0, {512: 0.88, 1024: 0.02, 2048: 0.025, 4096: 0.035, 8192: 0.03, 16384: 0.01}),)
DRAFT_LENGTHS = (*SHORT, Lengths(300, {512: 0.50, 1024: 0.13, 2048: 0.13, 4096: 0.11, 8192: 0.09, 16384: 0.04}))


@dataclass(frozen=True)
class Stage:
    """Settings of a stage. Its rate rises over warmup_steps and falls linearly over decay_share of the steps."""

    name: str
    model: ModelConfig
    mix: Mix
    steps: int
    seed: int
    lengths: tuple[Lengths, ...] = SHORT
    starts_from: str | None = None  # name of the stage whose weights it goes on with
    first_step: int = 0  # what batches and lengths are drawn for; later stages do not see the first batches again
    batch_tokens: int = 65536
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.0
    prompt_weight: float = 0.1  # of the tokens outside of answers
    mtp_weights: tuple[float, ...] = (0.3, 0.1)  # of the head's guesses two and three tokens ahead
    foreign_names: bool = False
    last_mix: Mix | None = None  # instead of mix, for the last part of the steps
    last_share: float = 0.0

    def rate(self, index: int) -> float:
        """Return the learning rate of the stage's step number `index`."""
        warmup = min(1.0, (index + 1) / self.warmup_steps)
        left = 1 - index / self.steps
        decay = 1.0 if left >= self.decay_share else max(MIN_RATE, left / self.decay_share)
        return self.learning_rate * warmup * decay

    def mix_at(self, index: int) -> Mix:
        """Return the mix of the stage's step number `index`."""
        is_last = self.last_mix is not None and index >= self.steps * (1 - self.last_share)
        return self.last_mix if is_last and self.last_mix else self.mix

    def row_tokens(self, index: int) -> int:
        """Return the tokens per row of the stage's step number `index`."""
        step = self.first_step + index
        shares = [lengths.shares for lengths in self.lengths if lengths.first_step <= step][-1]
        return random.Random(step * 31 + 7).choices(list(shares), list(shares.values()))[0]


STAGES = (
    # The language, all tasks, images and the MTP head together.
    Stage("pretraining", PICO, mixes.BASE, steps=4484, seed=1, lengths=PICO_LENGTHS),
    Stage(
        *("annealing", PICO, mixes.BASE),
        steps=2785,
        seed=2,
        lengths=PICO_LENGTHS,
        starts_from="pretraining",
        first_step=2000,
        warmup_steps=30,
        decay_share=0.55,
    ),
    # Thinking switched on for every kind of request.
    Stage(
        *("thinking", PICO, mixes.THINKING),
        steps=47,
        seed=77,
        starts_from="annealing",
        batch_tokens=4096,
        learning_rate=4e-4,
        warmup_steps=6,
        decay_share=1.0,
        mtp_weights=(0.3, 0.05),
    ),
    # Scenes with several shapes, and strings that are hard to copy.
    Stage(
        *("images", PICO, mixes.IMAGES),
        steps=3691,
        seed=4,
        lengths=IMAGE_LENGTHS,
        starts_from="thinking",
        first_step=5000,
        warmup_steps=60,
        decay_share=0.6,
        prompt_weight=0.04,
        foreign_names=True,
        last_mix=mixes.IMAGES_LAST,
        last_share=0.125,
    ),
    # Wordings that had become ambiguous: "How many shapes are there?" was answered as "How many red shapes ...?".
    Stage(
        *("counting", PICO, mixes.COUNTING),
        steps=36,
        seed=5,
        starts_from="images",
        batch_tokens=3072,
        learning_rate=2.5e-4,
        warmup_steps=5,
        decay_share=1.0,
        prompt_weight=0.04,
        mtp_weights=(0.3, 0.05),
        foreign_names=True,
    ),
    Stage(
        *("describing", PICO, mixes.DESCRIBING),
        steps=31,
        seed=9,
        starts_from="counting",
        batch_tokens=3072,
        learning_rate=3e-4,
        warmup_steps=5,
        decay_share=1.0,
        prompt_weight=0.04,
        mtp_weights=(0.3, 0.05),
        foreign_names=True,
    ),
    # The text model that scores prompts for sparse prefill.
    Stage("draft", DRAFT, mixes.TEXT, steps=4000, seed=1, lengths=DRAFT_LENGTHS, decay_share=0.35),
    Stage(
        *("draft annealing", DRAFT, mixes.TEXT),
        steps=3000,
        seed=3,
        lengths=DRAFT_LENGTHS,
        starts_from="draft",
        first_step=2000,
        warmup_steps=30,
        decay_share=0.6,
    ),
)
FINAL_STAGES = {"describing": "demo_model", "draft annealing": "demo_model/draft"}
"""Stages whose weights are exported, and the folder for each."""
