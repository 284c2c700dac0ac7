"""Random schedules for a ModelRunner: arrivals, aborts, preemptions and failures by step, and their execution.

Nothing of the scheduler is in it: tokens are cut at stop tokens and max_tokens here.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from engine.config import GrammarConfig
from engine.core.prompt import Prompt
from engine.core.row import Matcher, Row
from engine.core.runner import NO_TOKEN, Drafts, ModelRunner, RowOutput
from engine.processing.grammar import GrammarCompiler
from engine.processing.images import ImagePreprocessor
from engine.protocol import (
    EngineRequest,
    FinishReason,
    GrammarSpec,
    ImagePatches,
    SamplingParams,
    TokenLogprobs,
    choice_seed,
)

MAX_STEPS = 3000

RowsOf = Callable[[int, str], list[Row]]
"""(number of a specimen, request id) -> new rows, one per choice."""


@dataclass(frozen=True)
class Schedule:
    """arrivals: (step, number of a specimen). aborts: (step, index of an arrival). preemptions: (step, how manieth of
    the running rows). failures: (step, which call fails: decode or prefill; or reset, as after a failure elsewhere).
    drafts, chunks, picks: per step and over again, the draft tokens, the prompt tokens, and whose prompt it is.
    """

    arrivals: tuple[tuple[int, int], ...]
    aborts: tuple[tuple[int, int], ...] = ()
    preemptions: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()
    drafts: tuple[int, ...] = (0,)
    chunks: tuple[int, ...] = (256,)
    picks: tuple[int, ...] = (0,)


def schedules(num_specimens: int, max_requests: int = 6) -> st.SearchStrategy[Schedule]:
    steps, places = st.integers(0, 40), st.integers(0, 5)
    return st.builds(
        Schedule,
        arrivals=_tuples(st.tuples(st.integers(0, 24), st.integers(0, num_specimens - 1)), max_requests, 1),
        aborts=_tuples(st.tuples(steps, places), 2),
        preemptions=_tuples(st.tuples(steps, places), 4),
        failures=st.one_of(
            st.just(()), st.just(()), _tuples(st.tuples(steps, st.sampled_from(["decode", "prefill", "reset"])), 2)
        ),
        drafts=_tuples(st.integers(0, 3), 7, 1),
        chunks=_tuples(st.sampled_from([16, 33, 1, 2, 7, 64, 256, 256]), 5, 2),
        picks=st.one_of(st.just((0,)), _tuples(st.integers(0, 2), 3, 1)),
    )


def _tuples(each: st.SearchStrategy, max_size: int, min_size: int = 0) -> st.SearchStrategy:
    return st.lists(each, min_size=min_size, max_size=max_size).map(tuple)


@dataclass(slots=True)
class Ending:
    """The tokens and the end of a row. finish: a finish reason; "abort" is the schedule's, "lost" the fault put into
    it."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    finish: str = ""
    error: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_resumed: int = 0


class Execution:
    """One schedule on a runner. `faults` makes the model's next forward fail while it is entered.

    endings: by row id, "<arrival>/<choice>". figures: what has happened, counted by name.
    """

    def __init__(
        self,
        runner: ModelRunner,
        schedule: Schedule,
        rows_of: RowsOf,
        faults: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.endings: dict[str, Ending] = {}
        self.figures: Counter[str] = Counter()
        self.step = 0
        self._runner, self._schedule, self._rows_of, self._faults = runner, schedule, rows_of, faults
        self._requests: dict[int, list[Row]] = {}
        self._waiting: list[list[Row]] = []  # groups that share a prompt, also those in prefill
        self._running: dict[str, Row] = {}
        self._drop: list[str] = []
        self._last_drafts = 0
        self._silent: set[str] = set()

    def run(self) -> dict[str, Ending]:
        last = max(step for step, _ in self._schedule.arrivals)
        try:
            while self._waiting or self._running or self.step <= last:
                self.next_step()
                assert self.step < MAX_STEPS, "the schedule does not end"
        except BaseException:
            self._runner.reset()
            self._runner.drop([row.id for rows in self._requests.values() for row in rows])
            raise
        self._runner.drop(self._drop)
        return self.endings

    def next_step(self) -> None:
        """As a scheduler would: what comes and goes, one decode step for the rows, one chunk of a prompt."""
        self._come_and_go()
        self._runner.drop(self._drop)
        self._drop = []
        if (self.step, "reset") in self._schedule.failures:
            self._lose_running()
        if self._running:
            self._decode(self._of_step(self._schedule.drafts))
        if self._waiting:
            self._prefill()
        self.step += 1

    def _of_step(self, values: Sequence[int]) -> int:
        return values[self.step % len(values)]

    def _come_and_go(self) -> None:
        for index, (step, specimen) in enumerate(self._schedule.arrivals):
            if step == self.step:
                rows = self._requests[index] = self._rows_of(specimen, str(index))
                self.endings |= {row.id: Ending(row.output_token_ids) for row in rows}
                self._waiting.append(Prompt(list(rows), arrived_s=0.0, rank=0.0).rows)
        for step, index in self._schedule.aborts:
            if step == self.step:
                for row in self._requests.get(index, ()):
                    self._end(row, FinishReason.ABORT)
        for step, place in self._schedule.preemptions:
            if step == self.step and self._running:
                self._preempt(list(self._running.values())[place % len(self._running)])

    def _preempt(self, row: Row) -> None:
        del self._running[row.id]
        self._silent.discard(row.id)
        self._drop.append(row.id)
        self.endings[row.id].num_resumed += 1
        self.figures["preempted"] += 1
        self._waiting.insert(0, Prompt([row], arrived_s=0.0, rank=0.0).rows)

    def _decode(self, num_drafts: int) -> None:
        drafts = self._drafts(num_drafts)
        most = max(drafts.num_tokens, self._last_drafts)
        try:
            with self._faults() if (self.step, "decode") in self._schedule.failures else nullcontext():
                outputs = self._runner.decode(drafts)
        except ZeroDivisionError:
            self._lose_running()
            return
        self._last_drafts = drafts.num_tokens
        self.figures["most rows"] = max(self.figures["most rows"], len(outputs))
        silent = self._running.keys() - outputs.keys()  # they joined after this step's tokens were started
        assert not silent & self._silent, "every row that has joined decodes once, or is one call behind"
        self._silent = silent
        for row in [row for row in self._running.values() if row.id in outputs]:
            assert outputs[row.id].num_drafted <= most
            self._take(row, outputs[row.id])

    def _drafts(self, num_drafts: int) -> Drafts:
        """Return drafts by prompt lookup in every third step, else by the heads in turns, as the runner has them."""
        heads = list(dict.fromkeys(one.proposer for one in self._runner.drafts if not one.is_selective)) or ["mtp"]
        proposer = "prompt_lookup" if self.step % 3 == 0 else heads[self.step % len(heads)]
        offered = [one.num_tokens for one in self._runner.drafts if one.proposer == proposer]
        num_tokens = max((k for k in offered if k <= num_drafts), default=0)
        return Drafts(num_tokens, proposer, is_forced=self.step % 2 == 0)

    def _lose_running(self) -> None:
        self.figures["failures"] += 1
        self._runner.reset()
        for row in list(self._running.values()):
            self._end(row, "lost")

    def _prefill(self) -> None:
        group = self._waiting[self._of_step(self._schedule.picks) % len(self._waiting)]
        try:
            with self._faults() if (self.step, "prefill") in self._schedule.failures else nullcontext():
                if group[0].spec.images and (image := self._runner.next_image(group)) is not None:
                    self._runner.encode(group, 1 if self.step % 2 else image.num_blocks)
                    return
                output = self._runner.prefill(tuple(group), self._of_step(self._schedule.chunks))
        except ZeroDivisionError:
            self.figures["failures"] += 1
            for row in list(group):
                self._end(row, "lost")
            return
        prompt = group[0].prompt
        prompt.num_prefilled += output.num_tokens
        assert (output.first is not None) == (not prompt.num_left)
        if output.first is None:
            return
        self._waiting.remove(group)
        assert output.first.keys() == {row.id for row in group}
        for row in group:
            self._running[row.id] = row
            assert output.first[row.id].num_drafted == 0
            self._take(row, output.first[row.id])

    def _take(self, row: Row, output: RowOutput) -> None:
        """The row's new tokens, up to the one that ends it."""
        ending = self.endings[row.id]
        if output.error is not None:
            ending.error = output.error
            self._end(row, FinishReason.ERROR)
            return
        assert 1 <= len(output.token_ids) <= output.num_accepted + 1 <= output.num_drafted + 1
        asked = row.sampling.logprobs is not None
        assert len(output.logprobs) == (len(output.token_ids) if asked else 0)
        ending.num_drafted += output.num_drafted
        ending.num_accepted += output.num_accepted
        before = len(row.output_token_ids)
        for i, token_id in enumerate(output.token_ids):
            finish = FinishReason.ERROR if token_id == NO_TOKEN else row.append(token_id)
            if finish is not None:
                self.figures[f"{finish} inside a draft"] += i < output.num_accepted
                assert i + 1 == len(output.token_ids), "nothing is kept behind a row's last token"
                self._end(row, finish)
                break
        else:
            assert len(output.token_ids) == output.num_accepted + 1, "only behind a row's last token less is kept"
        ending.logprobs += output.logprobs[: len(row.output_token_ids) - before]

    def _end(self, row: Row, finish: str) -> None:
        """Out of wherever the row is; the runner drops it before the next step."""
        if self.endings[row.id].finish:
            return
        self.endings[row.id].finish = str(finish)
        if self._running.pop(row.id, None) is None:
            group = next(group for group in self._waiting if row in group)
            group.remove(row)
            self._waiting = [group for group in self._waiting if group]
        self._drop.append(row.id)


class Unruly:
    """A Matcher that allows everything, and breaks down after so many tokens: `when` is masks or advance."""

    def __init__(self, num_words: int, num_tokens: int, when: str, stop_token_ids: tuple[int, ...]):
        self._num_words, self._left, self._when, self._stops = num_words, num_tokens, when, stop_token_ids

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        if self._when == "masks" and self._left <= 0:
            raise ValueError("the grammar cannot go on")
        return np.full((len(draft) + 1, self._num_words), 0xFFFFFFFF, np.uint32)

    def advance(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if token_id in self._stops:
                return
            self._left -= 1
            if self._left < (self._when == "advance"):
                raise ValueError("the grammar cannot go on")

    def fork(self) -> "Unruly":
        return Unruly(self._num_words, self._left, self._when, self._stops)


JSON_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": -9, "maximum": 99}]},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "null"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
REGEXES = ("[a-c]{1,5}", "(yes|no|maybe)", r"\d{2}-\d{2}", "(ab|ba)+", "[^q]{3,12}")
GRAMMARS = (
    *(GrammarSpec("json_schema", json.dumps(schema)) for schema in JSON_SCHEMAS),
    GrammarSpec("json_object"),
    *(GrammarSpec("regex", regex) for regex in REGEXES),
)


class Specimens:
    """An endless row of requests for one model, each drawn from its number alone. The same number, the same request."""

    def __init__(self, model_dir: Path, vocab_size: int, sees: bool):
        config = json.loads((model_dir / "config.json").read_text())
        eos = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
        self.stop_token_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        self.image_token_id = config.get("image_token_id")
        self._marks = [config.get("vision_start_token_id"), config.get("vision_end_token_id")]
        self._vocab_size, self._name = vocab_size, model_dir.name
        self._preprocessor = ImagePreprocessor(model_dir) if sees else None
        self._compiler = GrammarCompiler(model_dir, vocab_size, self.stop_token_ids, GrammarConfig())
        self.spec = cache(self._spec)  # (number) -> EngineRequest
        self.image = cache(self._image)  # (number) -> ImagePatches: a picture of its own, of one of six sizes

    def _spec(self, number: int) -> EngineRequest:
        rng = random.Random(number)
        sampling = self._sampling(rng)
        counts = (5, 20, 60, 60) if not sampling.min_tokens else (60, 250, 250)  # many, so that they are met
        stop_token_ids = rng.choice([(), self.stop_token_ids, *(self._tokens(rng, count) for count in counts)])
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.3 else None
        images = self._images(rng) if rng.random() < 0.3 else ()
        return EngineRequest(
            "",
            self._prompt(rng, images),
            sampling,
            stop_token_ids if grammar is None else self.stop_token_ids,
            images,
            rng.choice([1, 1, 1, 2, 3]),
            grammar,
        )

    def rows(self, number: int, request_id: str) -> list[Row]:
        spec = replace(self.spec(number), request_id=request_id)
        matcher = self.matcher(number)
        return [Row(spec, i, None if matcher is None else matcher.fork()) for i in range(spec.num_choices)]

    def choice(self, number: int, index: int) -> list[Row]:
        """One choice of the request, as a request of its own."""
        spec = self.spec(number)
        sampling = replace(spec.sampling, seed=choice_seed(spec.sampling.seed, index))
        return [Row(replace(spec, num_choices=1, sampling=sampling), matcher=self.matcher(number))]

    def matcher(self, number: int) -> Matcher | None:
        spec, rng = self.spec(number), random.Random(f"matcher {number}")
        if spec.grammar is not None:
            return asyncio.run(self._compiler.compile(spec.grammar))
        if rng.random() < 0.05:
            when = rng.choice(["masks", "advance"])
            return Unruly((self._vocab_size + 31) // 32, rng.randint(1, 20), when, spec.stop_token_ids)
        return None

    def _tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        """Plain text; no picture's place among them."""
        return tuple(rng.randrange(16, self._vocab_size) for _ in range(count))

    def _prompt(self, rng: random.Random, images: Sequence[ImagePatches]) -> np.ndarray:
        text = list(self._tokens(rng, rng.randint(1, rng.choice([6, 12, 24, 200]))))
        for image in images:
            before, after = self._marks
            text += [before, *[self.image_token_id] * image.num_tokens, after, *self._tokens(rng, rng.randint(0, 4))]
        return np.array(text, np.int32)

    def _images(self, rng: random.Random) -> tuple[ImagePatches, ...]:
        return tuple(self.image(rng.randrange(1000)) for _ in range(rng.randint(1, 2))) if self._preprocessor else ()

    def _image(self, number: int) -> ImagePatches:
        assert self._preprocessor is not None
        width, height = ((32, 32), (64, 48), (48, 80), (64, 64), (96, 32), (80, 64))[number % 6]
        pixels = np.random.default_rng(number).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        return self._preprocessor.patches(picture)

    def _sampling(self, rng: random.Random) -> SamplingParams:
        max_tokens = min(rng.randint(1, 40) for _ in range(2))
        biases = [(token, rng.choice([5.0, -100.0, 2.5])) for token in self._tokens(rng, rng.randint(1, 5))]
        if self.image_token_id is not None and rng.random() < 0.2:
            biases.append((self.image_token_id, 5.0))  # only a token, when the model says it
        return SamplingParams(
            max_tokens,
            temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
            top_k=rng.choice([0, 0, 0, 1, 5, 40]),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
            seed=rng.randrange(2**64),
            presence_penalty=rng.choice([0.0, 0.0, 2.0, -2.0]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.0, -2.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5, 0.3]),
            logit_bias=rng.choice([(), (), tuple(dict(biases).items())]),
            min_tokens=min(max_tokens, rng.choice([0, 0, 3, 10])),
            logprobs=rng.choice([None, 0, 2, 20]),
        )
