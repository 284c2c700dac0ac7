"""Invariants under random schedules: the same tokens in any company, and nothing left behind.

ORCHARD_SCHEDULES=5000 runs that many, different ones each time. -s prints what they have covered.
"""

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import Drafts, RowOutput
from engine.protocol import EngineRequest, GrammarSpec, SamplingParams, TokenLogprobs
from engine.worker.model_runner import MLXRunner
from engine.worker.sampler import Sampler
from tests.support.cold_runner import load_cold
from tests.support.conversations import agree
from tests.support.demo_model import DEMO
from tests.support.dflash import write_dflash
from tests.support.driver import encode_images
from tests.support.families import FAMILIES
from tests.support.gemma4_assistant import write_assistant
from tests.support.night import some_at_night
from tests.support.schedule_runs import NUM_SCHEDULES, check_many
from tests.support.schedules import Ending, Execution, Schedule, Specimens
from tests.support.tiny import write_side_files
from tests.support.zoo import make as make_zoo

NUM_REFERENCE_TOKENS = 12


@dataclass(frozen=True)
class Kind:
    """A random model, its share of the schedules, and how it runs.

    acceptance: more and less than these shares of the drafts. max_waste: bytes; a small one makes many groups.
    has_drafter: a DFlash drafter in the place of the checkpoint's head, or Gemma 4's assistant.
    has_both: the checkpoint's head beside the drafter, and prompt lookup.
    family: one of the zoo, without images, in the place of a tiny model.
    """

    tiny: dict[str, Any]
    share: float
    acceptance: tuple[float, float] = (0.1, 0.9)
    config: dict[str, Any] = field(default_factory=dict)
    max_waste: int | None = None
    has_drafter: bool = False
    has_both: bool = False
    family: str | None = None


KINDS = {
    "deep": Kind({"layers": 4, "interval": 4, "agree": 0.3}, 0.2),
    "alternating": Kind({"layers": 4, "interval": 2, "agree": 0.1, "seed": 1}, 0.2, max_waste=1 << 14),
    "small": Kind({"layers": 2, "interval": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "agree": 0.3, "seed": 2}, 0.25),
    "foreign head": Kind({"layers": 2, "interval": 2, "seed": 3}, 0.1, (-1, 0.5)),
    "tied": Kind({"layers": 2, "interval": 2, "tie": True, "agree": 0.3, "seed": 4}, 0.2),
    "compiled": Kind({"layers": 2, "interval": 2, "agree": 0.3, "seed": 5}, 0.08, config={"compile": "on"}),
    "drafter": Kind({"layers": 3, "interval": 2, "seed": 6}, 0.1, (0, 0.5), has_drafter=True),
    "head and drafter": Kind(
        {"layers": 3, "interval": 2, "agree": 0.1, "seed": 7}, 0.1, (0, 0.9), has_drafter=True, has_both=True
    ),
    "assistant": Kind({}, 0.2, (0, 0.5), has_drafter=True, family="gemma4_text"),
}


class Bench:
    """One model with its specimens, and what each of them gets alone and without drafts: the truth for all else."""

    def __init__(self, runner: MLXRunner, model_dir: Path):
        self.runner = runner
        self.specimens = Specimens(model_dir, runner.vocab_size, "image" in runner.capabilities["media"])
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.figures: Counter[str] = Counter()
        self.lm = runner._model.module.language_model
        self._alone: dict[tuple[int, int], Ending] = {}

    def alone(self, number: int, choice: int = 0) -> Ending:
        if (number, choice) not in self._alone:
            once = Schedule(arrivals=((0, number),))
            execution = Execution(self.runner, once, lambda number, _: self.specimens.choice(number, choice))
            (ending,) = execution.run().values()
            if number % 3 == 0:
                self._check_reference(number, choice, ending)
            self._alone[number, choice] = ending
        return self._alone[number, choice]

    def check(self, schedule: Schedule) -> None:
        execution = Execution(self.runner, schedule, self.specimens.rows, self._fault)
        endings = execution.run()
        memory = self.runner.memory()
        assert memory["decode_cache_bytes"] == 0 and memory["prefill_cache_bytes"] == 0
        for row_id, ending in endings.items():
            arrival, choice = map(int, row_id.split("/"))
            number = schedule.arrivals[arrival][1]
            self._compare(f"row {row_id}, specimen {number}", ending, self.alone(number, choice))
            self._check_promises(number, ending)
            self._count(ending)
        self.figures["most rows"] = max(self.figures["most rows"], execution.figures.pop("most rows", 0))
        self.figures += execution.figures
        self.figures["schedules"] += 1

    @contextmanager
    def _fault(self) -> Iterator[None]:
        with mock.patch.object(type(self.lm.model), "__call__", side_effect=ZeroDivisionError):
            yield

    def _compare(self, name: str, got: Ending, alone: Ending) -> None:
        num = len(got.token_ids)
        assert got.token_ids == alone.token_ids[:num], f"{name}: {got} instead of {alone}"
        if got.finish not in ("abort", "lost"):
            assert got.finish == alone.finish, f"{name}: {got} instead of {alone}"
            # the tokens of the step in which a row's grammar fails are lost with it
            assert got.error is not None or num == len(alone.token_ids), f"{name}: {got} instead of {alone}"
        _compare_logprobs(name, got.logprobs, alone.logprobs[:num])

    def _check_promises(self, number: int, ending: Ending) -> None:
        """No output is shorter or longer than asked; under a grammar whole ones parse, and cut ones could go on to."""
        grammar, sampling = self.specimens.spec(number).grammar, self.specimens.spec(number).sampling
        assert len(ending.token_ids) <= sampling.max_tokens
        assert len(ending.token_ids) >= sampling.min_tokens or ending.finish != "stop", f"specimen {number}: {ending}"
        if grammar is None:
            return
        matcher = self.specimens.matcher(number)
        assert matcher is not None
        tokens = tuple(ending.token_ids)
        assert len(matcher.masks(tokens)) == len(tokens) + 1, f"specimen {number}: {grammar} forbids {tokens}"
        if ending.finish == "stop":
            _parse(grammar, self.tokenizer.decode(list(tokens), skip_special_tokens=False))
            self.figures["parsed"] += 1

    def _count(self, ending: Ending) -> None:
        self.figures += Counter(
            {
                "rows": 1,
                "tokens": len(ending.token_ids),
                "drafted": ending.num_drafted,
                "accepted": ending.num_accepted,
                f"ended by {ending.finish} {ending.error or ''}".strip(): 1,
                "resumed to the end": bool(ending.num_resumed and ending.finish in ("stop", "length")),
            }
        )

    def _check_reference(self, number: int, choice: int, ending: Ending) -> None:
        (row,) = self.specimens.choice(number, choice)
        for position, token_id in enumerate(ending.token_ids[:NUM_REFERENCE_TOKENS]):
            logits = self._logits(row)
            assert self._sample(row, logits) == token_id, f"specimen {number}, position {position}"
            if row.sampling.logprobs is not None:
                _compare_logprobs(f"specimen {number}", [ending.logprobs[position]], [_logprobs(row, logits, token_id)])
            row.append(token_id)
            if row.matcher is not None:
                row.matcher.advance((token_id,))
            self.figures["tokens of the reference"] += 1
        if ending.finish == "stop" and len(ending.token_ids) < NUM_REFERENCE_TOKENS:
            assert self._sample(row, self._logits(row)) in row.spec.stop_token_ids, f"specimen {number} goes on"

    def _logits(self, row: Row) -> np.ndarray:
        """float64 [vocab]: the whole sequence anew, no cache, no chunks, no batch, positions by the library."""
        tokens = mx.array(row.prompt_token_ids)[None]
        if not hasattr(self.lm, "get_rope_index"):
            return np.array(self.lm(tokens).logits[0, -1]).astype(np.float64)
        images, output = row.spec.images, mx.arange(1, len(row.output_token_ids) + 1)
        grids = mx.array([image.grid_thw for image in images], mx.int32) if images else None
        positions, _ = self.lm.get_rope_index(mx.array(row.spec.token_ids)[None], grids)
        after = mx.broadcast_to(positions.max() + output, (*positions.shape[:-1], output.size))
        positions = mx.concatenate([positions, after], axis=-1)
        embeds = self.lm.model.embed_tokens(tokens)
        if images:
            assert self.runner._vision is not None
            features = mx.concatenate([self.runner._vision.encode(image) for image in images])
            where = np.flatnonzero(row.spec.token_ids == self.specimens.image_token_id)
            embeds[0, mx.array(where)] = features
        logits = self.lm(tokens, inputs_embeds=embeds, position_ids=positions).logits[0, -1]
        return np.array(logits.astype(mx.float32)).astype(np.float64)

    def _sample(self, row: Row, logits: np.ndarray) -> int:
        shaped = mx.array(_shaped(row, logits).astype(np.float32))[None, None]
        sampler = Sampler([row.sampling])
        noise = sampler.noise(mx.array([[len(row.output_token_ids)]]), len(logits))
        return int(np.array(sampler(shaped, noise))[0, 0])


def _shaped(row: Row, logits: np.ndarray) -> np.ndarray:
    """Return the logits of an output position, changed as SamplingParams says, in its order, up to the temperature."""
    p, output, result = row.sampling, row.output_token_ids, logits.copy()
    for token in {*row.spec.token_ids.tolist(), *output}:
        result[token] *= 1 / p.repetition_penalty if result[token] > 0 else p.repetition_penalty
    for token, count in Counter(output).items():
        result[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias:
        result[token] += bias
    if len(output) < p.min_tokens:
        result[list(row.spec.stop_token_ids)] = -np.inf
    if row.matcher is not None:
        bits = np.unpackbits(row.matcher.masks()[0].view(np.uint8), bitorder="little")[: len(result)]
        result[bits == 0] = -np.inf
    return result


def _logprobs(row: Row, logits: np.ndarray, token_id: int) -> TokenLogprobs:
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-logprobs)[: row.sampling.logprobs]
    return TokenLogprobs(logprobs[token_id], tuple((int(i), logprobs[i]) for i in best))


def _compare_logprobs(name: str, got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """The order of alternatives may differ where they are equal but for rounding."""
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert len(mine.top) == len(theirs.top)
        values = [(mine.logprob, theirs.logprob), *((a[1], b[1]) for a, b in zip(mine.top, theirs.top, strict=True))]
        assert all(agree(a, b) for a, b in values), f"{name}: {mine} instead of {theirs}"
        sure = [v for _, v in theirs.top[:-1]]
        for i, (a, b) in enumerate(zip(mine.top[:-1], theirs.top[:-1], strict=True)):
            alike = [v for j, v in enumerate(sure) if j != i and agree(v, sure[i])]
            assert a[0] == b[0] or alike or agree(theirs.top[-1][1], sure[i]), name


def _parse(grammar: GrammarSpec, text: str) -> None:
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text), f"{text!r} does not match {grammar.text}"
        return
    value = json.loads(text)
    jsonschema.validate(value, json.loads(grammar.text) if grammar.text else {"type": "object"})


def _load(path: Path, kind: Kind) -> MLXRunner:
    write = write_dflash if kind.family is None else write_assistant
    drafter = str(write(path)) if kind.has_drafter else None
    mtp_head = ("own", drafter) if kind.has_both and drafter is not None else drafter
    runner = load_cold(EngineConfig(model=str(path), mtp_head=mtp_head, **kind.config))
    if kind.max_waste is not None:  # a group may waste as much as the weights weigh
        runner.costs = replace(runner.costs, base_bytes=kind.max_waste)
    return runner


@pytest.fixture(scope="session")
def bench_of(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Bench]]:
    """bench_of(name of one of KINDS), built once."""
    benches: dict[str, Bench] = {}

    def make(name: str) -> Bench:
        if name not in benches:
            kind = KINDS[name]
            if kind.family is None:
                path = tiny_model(**kind.tiny)
            else:
                path = make_zoo(tmp_path_factory.mktemp("zoo") / kind.family, FAMILIES[kind.family])
                write_side_files(path)
            benches[name] = Bench(_load(path, KINDS[name]), path)
        return benches[name]

    yield make
    for bench in benches.values():
        bench.runner.close()


@pytest.mark.parametrize(
    "name",
    some_at_night(
        KINDS,
        ["alternating", "small", "foreign head", "compiled", "drafter", "head and drafter", "assistant"],
        "the gate has models with the same layers; a tied output layer is that of families of test_families.py",
    ),
)
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(bench_of, name):
    bench: Bench = bench_of(name)
    check_many(bench, name, int((NUM_SCHEDULES or 40) * KINDS[name].share))
    figures = bench.figures
    for what in ("resumed to the end", "parsed", "ended by stop", "ended by length", "length inside a draft"):
        assert figures[what], f"the schedules have nothing {what}"
    low, high = KINDS[name].acceptance
    assert low < figures["accepted"] / figures["drafted"] < high, "the schedules show nothing about drafts"


@pytest.mark.night(
    "tiny models have its layers; tests/engine/core/test_engine_core.py compares batches of it with rows alone"
)
def test_a_request_to_the_demo_model_gets_the_same_tokens_alone_and_in_any_batch(runner):
    bench = Bench(runner, DEMO)
    check_many(bench, "demo", max(5, NUM_SCHEDULES // 100), max_requests=3)
    assert bench.figures["drafted"]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_joining_row_of_any_length_gets_the_same_logprobs_as_alone(bench_of, num_drafts, drop):
    """Beside a row with a step in flight; tokens would seldom tell, but the probabilities do."""
    runner = bench_of("foreign head").runner
    for length in range(1, 16):
        alone = _logprobs_of(runner, _plain("alone", length), num_drafts)
        old = _plain("old", 10)
        runner.prefill([old], 100)
        runner.decode(Drafts(num_drafts))
        beside = _logprobs_of(runner, _plain("new", length), num_drafts, leaves=old.id if drop else None)
        runner.drop([old.id])
        _compare_logprobs(f"a prompt of {length} tokens", beside[:5], alone[:5])


def _plain(name: str, num_prompt_tokens: int) -> Row:
    prompt = np.random.default_rng(num_prompt_tokens).integers(16, 512, num_prompt_tokens).astype(np.int32)
    return Row(EngineRequest(name, prompt, SamplingParams(100, 0.0, logprobs=3), ()))


def _logprobs_of(runner: MLXRunner, row: Row, num_drafts: int, leaves: str | None = None) -> list[TokenLogprobs]:
    """Return the logprobs of the row's first tokens; the row `leaves` is dropped when this one has joined."""
    encode_images(runner, row)
    while (first := runner.prefill([row], 100).first) is None:
        pass
    logprobs = list(first[row.id].logprobs)
    runner.drop([leaves] if leaves else [])
    while len(logprobs) < 5:
        logprobs += runner.decode(Drafts(num_drafts)).get(row.id, RowOutput(())).logprobs
    runner.drop([row.id])
    return logprobs


@pytest.mark.parametrize("gone", [0, 1])
def test_a_choice_dropped_during_prefill_does_not_affect_the_other_choices(bench_of, gone):
    """The prompt stays, however much of it is done, as long as one is still to join."""
    runner = bench_of("small").runner
    spec = EngineRequest("choices", np.arange(20, 60, dtype=np.int32), SamplingParams(8), (), num_choices=3)
    rows = [Row(spec, index) for index in range(3)]
    runner.prefill(rows, 16)
    runner.drop([rows[gone].id])
    left = [row for row in rows if row is not rows[gone]]
    output = runner.prefill(left, 100)
    runner.drop([row.id for row in rows])
    assert output.num_tokens == 24 and output.first is not None and output.first.keys() == {row.id for row in left}


@pytest.mark.parametrize("name", ["deep", "foreign head"])
def test_the_answer_to_an_image_changes_with_the_image_and_with_the_order(bench_of, name):
    bench: Bench = bench_of(name)
    image, ids = bench.specimens.image, bench.specimens.image_token_id
    pictures = [image(number) for number in (0, 6, 12, 18)]  # of one size
    assert len({picture.num_tokens for picture in pictures}) == 1
    places = [3, *[ids] * pictures[0].num_tokens, 4]
    prompt = np.array([50, 51, *places, 52, *places, 53, 54], np.int32)
    answers = {}
    for pair in ((0, 1), (1, 0), (2, 1), (0, 3), (0, 0)):
        images = tuple(pictures[i] for i in pair)
        row = Row(EngineRequest(str(pair), prompt, SamplingParams(100, 0.0, logprobs=0), (), images))
        answers[pair] = [one.logprob for one in _logprobs_of(bench.runner, row, 2)[:5]]
        row.spec = replace(row.spec, request_id="again")
        assert np.allclose([one.logprob for one in _logprobs_of(bench.runner, row, 0)[:5]], answers[pair], atol=1e-4)
    for pair, answer in answers.items():
        others = [other for key, other in answers.items() if key != pair]
        assert all(np.abs(np.subtract(answer, other)).max() > 1e-3 for other in others), pair


def test_text_never_touches_the_vision_tower(bench_of):
    bench: Bench = bench_of("small")
    tower = type(bench.runner._model.module.vision_tower)
    with mock.patch.object(tower, "__call__", side_effect=AssertionError("the vision tower was called")):
        assert len(_logprobs_of(bench.runner, _plain("text", 20), 2)) >= 5


def test_memory_returns_to_its_level_when_all_rows_have_ended(bench_of):
    bench: Bench = bench_of("small")
    schedule = Schedule(tuple((step, 2 * step) for step in range(12)), failures=((20, "reset"),), drafts=(0, 3, 1))
    active = []
    for _ in range(4):
        Execution(bench.runner, schedule, bench.specimens.rows, bench._fault).run()
        gc.collect()
        mx.synchronize()
        active.append(mx.get_active_memory())
    assert max(active[1:]) <= active[1] + 4096, active
