"""Random requests whose answers move between engines of one model: the pieces are the undisturbed answer."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from engine.config import EngineConfig
from engine.core.row import Matcher
from engine.protocol import EngineRequest, FinishReason, Progress, TokenLogprobs
from engine.worker.model_runner import MLXRunner
from tests.support.conversations import compare_logprobs, row_name
from tests.support.driver import Driver
from tests.support.schedules import Specimens

MAX_STEPS = 3000
NO_CACHE: dict[str, Any] = {"prefix_cache": {"enabled": False}}
PLAIN: dict[str, Any] = {"mtp": "off", "prompt_lookup": "off"}


@dataclass
class Piece:
    """The tokens of one choice so far."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    finish: FinishReason | None = None  # None if the choice was moved.
    error: str | None = None

    @property
    def progress(self) -> Progress:
        return Progress(self.token_ids, self.finish is not None)

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(
            self.token_ids + other.token_ids, self.logprobs + other.logprobs, other.finish, other.error or self.error
        )

    def cut(self, num_tokens: int) -> "Piece":
        return Piece(self.token_ids[:num_tokens], self.logprobs[:num_tokens])


Pieces = dict[tuple[int, int], Piece]
"""(number of a specimen, index of a choice) -> what the choice has got."""


class Moves:
    """One model, and what it answers to each specimen alone, without a cache and without drafts.

    Attributes:
        figures: What has happened, counted by name.
    """

    def __init__(self, runner: MLXRunner, specimens: Specimens):
        self.runner, self.specimens = runner, specimens
        self.whole = cache(self._whole)  # (number of a specimen) -> the answer of each choice
        self.figures: Counter[str] = Counter()

    def _whole(self, number: int) -> list[Piece]:
        driver = self._driver(NO_CACHE | PLAIN)
        self._add(driver, number, self.specimens.spec(number))
        driver.run({0: ()})
        return [_piece(driver, row_name(number, i)) for i in range(self.specimens.spec(number).num_choices)]

    def check_cuts(self, numbers: Iterable[int], rng: random.Random, **config: Any) -> None:
        """Cut the choices of these specimens at random tokens, and continue them all in one engine."""
        cut = {}
        for number in numbers:
            answers = self.whole(number)
            open_ones = {rng.randrange(len(answers)), *(i for i in range(len(answers)) if rng.random() < 0.7)}
            if not all(answers[i].token_ids for i in open_ones):
                continue
            for i, answer in enumerate(answers):
                finished = i not in open_ones
                # an error or a stop token may follow the last token; max_tokens may not
                num_most = len(answer.token_ids) - (answer.finish is FinishReason.LENGTH)
                cut[number, i] = answer if finished else answer.cut(rng.randint(0, num_most))
                self.figures["finished" if finished else "cut"] += 1
        self._continue_all(cut, rng, config)

    def _continue_all(self, cut: Pieces, rng: random.Random, config: Mapping[str, Any]) -> None:
        driver, begun = self._driver(config), _by_number(cut)
        arrivals = [(rng.randint(0, 6), number) for number in begun]
        for step in range(MAX_STEPS):
            for when, number in arrivals:
                if when == step:
                    self._add(driver, number, self._with_progress(number, begun[number]))
            if step > 6 and not driver.core.has_work:
                break
            driver.core.step()
        self._count(driver)
        for (number, i), piece in cut.items():
            if piece.finish is None:
                piece += _piece(driver, row_name(number, i))
            else:
                assert row_name(number, i) not in driver.chunks
            self._compare(number, i, piece)

    def check_moves(self, numbers: Sequence[int], rng: random.Random, configs: Sequence[Mapping[str, Any]]) -> None:
        """Let requests move from engine to engine at random steps until the last one completes them."""
        got: Pieces = {(number, i): Piece() for number in numbers for i in range(len(self.whole(number)))}
        for hop, config in enumerate(configs):
            is_last = hop == len(configs) - 1
            num_steps = MAX_STEPS if is_last else rng.randint(1, 25)
            driver = self._driver(config)
            left = {n: pieces for n, pieces in _by_number(got).items() if any(p.finish is None for p in pieces)}
            arrivals = [(rng.randint(0, min(6, num_steps - 1)), number) for number in left]
            for step in range(num_steps):
                for when, number in arrivals:
                    if when == step:
                        self._add(driver, number, self._with_progress(number, left[number]))
                if step > 6 and not driver.core.has_work:
                    break
                driver.core.step()
            driver.core.move_all()
            self._count(driver)
            memory = self.runner.memory()
            assert memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0
            assert not driver.core.has_work and driver.core.prefixes.store.integrity_error() is None
            for number, pieces in left.items():
                for i, piece in enumerate(pieces):
                    if piece.finish is None:
                        got[number, i] = piece + _piece(driver, row_name(number, i))
        for (number, i), piece in got.items():
            self._compare(number, i, piece)

    def _compare(self, number: int, index: int, piece: Piece) -> None:
        whole, name = self.whole(number)[index], f"choice {index} of specimen {number}"
        assert piece.token_ids == whole.token_ids, f"{name}: {piece} instead of {whole}"
        assert (piece.finish, piece.error) == (whole.finish, whole.error), f"{name}: {piece} instead of {whole}"
        compare_logprobs(name, piece.logprobs, whole.logprobs)

    def _driver(self, config: Mapping[str, Any]) -> Driver:
        return Driver(self.runner, EngineConfig.model_validate({"max_running": 8, **config}))

    def _with_progress(self, number: int, pieces: Sequence[Piece]) -> EngineRequest:
        spec = self.specimens.spec(number)
        if not any(piece.token_ids or piece.finish for piece in pieces):
            return spec
        return replace(spec, progress=tuple(piece.progress for piece in pieces))

    def _add(self, driver: Driver, number: int, spec: EngineRequest) -> None:
        """Queue a request with matchers that have consumed its progress, as GrammarCompilers.matchers returns them."""
        matcher, matchers = self.specimens.matcher(number), list[Matcher]()
        if matcher is not None:
            matchers = [matcher.fork() for _ in spec.open_choices]
        if spec.progress:
            for index, one in zip(spec.open_choices, matchers, strict=False):
                one.advance(spec.progress[index].token_ids)
        driver.core.add_request(replace(spec, request_id=str(number)), matchers)

    def _count(self, driver: Driver) -> None:
        stats = driver.core.stats
        self.figures += Counter(
            moved=stats.num_moved,
            continued=stats.num_finished,
            drafted=stats.num_drafted,
            cached_tokens=stats.num_cached_tokens,
            preempted=stats.num_preempted,
        )


def _piece(driver: Driver, name: str) -> Piece:
    logprobs = tuple(one for chunk in driver.chunks[name] for one in chunk.logprobs)
    finish = driver.finish[name]
    is_moved = finish is FinishReason.MOVED
    return Piece(tuple(driver.tokens[name]), logprobs, None if is_moved else finish, driver.errors[name])


def _by_number(pieces: Pieces) -> dict[int, list[Piece]]:
    """Group by specimen; the choices are in order."""
    grouped: dict[int, list[Piece]] = {}
    for (number, _), piece in pieces.items():
        grouped.setdefault(number, []).append(piece)
    return grouped
