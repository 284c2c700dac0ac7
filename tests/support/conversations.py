"""Requests whose prompts share parts, random traffic of them, and the rules that a prefix cache must follow."""

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from engine.cache_miss import CacheMiss
from engine.config import EngineConfig, PrefixCacheConfig
from engine.core.prefix_cache.snapshot_boundaries import LEAST_TOKENS
from engine.core.prompt import Prompt
from engine.core.runner import ModelRunner
from engine.protocol import (
    Boundary,
    EngineRequest,
    FinishReason,
    ImagePatches,
    SamplingParams,
    TokenLogprobs,
)
from engine.worker.model_runner import MLXRunner
from tests.support.driver import Driver
from tests.support.schedules import Specimens

MAX_STEPS = 3000
MAX_TOKENS = 6
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 48, 63, 64, 65, 100)
"""Lengths of the pieces that prompts are made of: around the least distance of boundaries, and around ends of
chunks."""
LEADS = (0, 0, 1, 5, 20)
"""With so many tokens in common two pieces begin that follow on the same one."""

LOGPROB_TOLERANCE = 2e-4
"""Largest difference of small float32 logprobs between chunks or batches of different shapes. Tokens must be equal."""


def agree(logprob: float, other: float) -> bool:
    """Return whether two logprobs are equal but for rounding, which grows with the logits."""
    return math.isclose(logprob, other, rel_tol=2e-5, abs_tol=LOGPROB_TOLERANCE)


DRAFTS = {"max_draft_tokens": 3, "max_rows": 8}


class SharedSpecimens(Specimens):
    """Specimens whose prompts are walks from the root of one tree, with tails of their own.

    Their boundaries are ends of pieces, or any places, so that equal tokens are cut differently, or nowhere.
    """

    def _spec(self, number: int) -> EngineRequest:
        spec, rng = super()._spec(number), random.Random(f"shared {number}")
        ids, images, ends = self._walk(rng)
        most = min(spec.sampling.max_tokens, MAX_TOKENS)
        sampling = replace(spec.sampling, max_tokens=most, min_tokens=min(spec.sampling.min_tokens, most))
        boundaries = self._boundaries(rng, len(ids), ends)
        return replace(spec, token_ids=ids, images=images, sampling=sampling, boundaries=boundaries)

    def _walk(self, rng: random.Random) -> tuple[np.ndarray, tuple[ImagePatches, ...], list[int]]:
        """Token ids, pictures, and where pieces end."""
        path, ids, images, ends = "", [], [], []
        least = 1
        for _ in range(rng.randint(1, 4)):
            path += rng.choice("ab")
            piece, picture = self._piece(path)
            ids += piece
            ends.append(len(ids))
            if picture is not None:
                images.append(picture)
                least = len(ids)
        if rng.random() < 0.4:
            ids = ids[: rng.randint(least, len(ids))]
        ids += self._tokens(rng, rng.choice([0, 0, 1, 2, 16, 17]))
        return np.array(ids, np.int32), tuple(images), [end for end in ends if end < len(ids)]

    def _piece(self, path: str) -> tuple[list[int], ImagePatches | None]:
        """The same for the same path: text, or a picture, in whose place there may be another one of the same size."""
        rng, parent = random.Random(f"piece {path}"), random.Random(f"children of {path[:-1]}")
        lead = self._tokens(parent, parent.choice(LEADS))
        if self._preprocessor is not None and len(path) > 1 and parent.random() < 0.25:
            picture = self.image(6 * rng.randrange(8) + parent.randrange(6))
            before, after = self._marks
            return [*lead, before, *[self.image_token_id] * picture.num_tokens, after], picture
        length = rng.choice(LENGTHS)
        return [*lead, *self._tokens(rng, length)][:length], None

    def _boundaries(self, rng: random.Random, num_tokens: int, ends: list[int]) -> tuple[Boundary, ...]:
        way = rng.randrange(5)
        if way == 0 or num_tokens < 2:
            return ()
        places = sorted({ends[0], ends[-1]}) if ends else []
        if way == 1:
            places = sorted({rng.randrange(1, num_tokens) for _ in range(2)})
        kinds = ("system", "turn") if len(places) == 2 else (rng.choice(("system", "turn")),)
        return tuple(Boundary(kind, place) for kind, place in zip(kinds, places, strict=bool(places)))


@dataclass(frozen=True)
class Traffic:
    """arrivals: (step, number of a specimen, tenant). aborts: (step, index of an arrival). failures: steps whose
    forwards fail. preemptions: (step, how manieth of the rows that decode). cache, engine: the configuration."""

    arrivals: tuple[tuple[int, int, str], ...]
    aborts: tuple[tuple[int, int], ...] = ()
    failures: tuple[int, ...] = ()
    preemptions: tuple[tuple[int, int], ...] = ()
    cache: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> EngineConfig:
        answers = {"answers": False} if self.is_orderly and self.cache.get("enabled", True) else {}
        return EngineConfig.model_validate(
            {"mtp": DRAFTS, "prompt_lookup": "off", **self.engine, "prefix_cache": self.cache | answers}
        )

    @property
    def is_orderly(self) -> bool:
        """Every prompt is prefilled once, in the order of arrival, and nothing is evicted."""
        disturbs = self.aborts or self.failures or self.preemptions
        return not (disturbs or "max_gb" in self.cache or "scheduler" in self.engine)


def random_traffic(rng: random.Random, num_specimens: int, snapshot_gb: float) -> Traffic:
    """Few different requests, so that there is much to share. snapshot_gb: about what one snapshot takes."""
    numbers = [rng.randrange(num_specimens) for _ in range(rng.randint(2, 5))]
    last = rng.choice([0, 6, 20])
    arrivals = [
        (rng.randint(0, last), rng.choice(numbers), rng.choice(["", "", "", "other"])) for _ in range(rng.randint(4, 8))
    ]
    failing = rng.random() < 0.2
    cache: dict[str, Any] = {"min_tokens": rng.choice([16, 16, 16, 1, 40])}
    if rng.random() < 0.2:
        cache["boundaries"] = rng.choice([("system",), ("turn",), ("system", "turn"), ("turn", "prompt")])
    if rng.random() < 0.25:
        cache["max_gb"] = snapshot_gb * rng.choice([0.5, 1.2, 2.5])
    engine: dict[str, Any] = {"prefill_chunk_tokens": rng.choice([64, 16, 2048]), "max_running": rng.choice([8, 3])}
    if rng.random() < 0.1:
        engine["scheduler"] = {"policy": "shortest_first"}
    return Traffic(
        arrivals=tuple(sorted(arrivals)),
        aborts=tuple((rng.randint(0, last + 6), rng.randrange(8)) for _ in range(rng.randint(1, 3) * failing)),
        failures=tuple(rng.randint(0, last + 6) for _ in range(rng.randint(0, 2) * failing)),
        preemptions=_preemptions(rng, last) if failing or "max_gb" in cache or "scheduler" in engine else (),
        cache=cache,
        engine=engine,
    )


def _preemptions(rng: random.Random, last: int) -> tuple[tuple[int, int], ...]:
    """Not in orderly traffic; `last`: the step of the last arrival."""
    return tuple((rng.randint(1, last + 12), rng.randrange(4)) for _ in range(rng.choice([0, 1, 4])))


@dataclass
class Beginnings:
    """The order in which prompts began, and whether each had been computed when the next one did."""

    request_ids: list[str] = field(default_factory=list)
    overlap: bool = False

    def listen(self, driver: Driver) -> Driver:
        prefix, prefills = driver.core.prefixes, driver.core.scheduler.prefills
        begin = prefix.begin

        def heard(prompt: Prompt, wait_s: float = 0.0, copy_s: float = 0.0) -> bool:
            if prompt.session is None:
                self.overlap |= any(other.session is not None for other in prefills.in_progress)
                self.request_ids.append(prompt.row.spec.request_id)
            return begin(prompt, wait_s, copy_s)

        prefix.begin = heard
        return driver


def carry_out(
    runner: ModelRunner,
    traffic: Traffic,
    specimens: Specimens,
    faults: Callable[[], AbstractContextManager] = nullcontext,
    beginnings: Beginnings | None = None,
) -> Driver:
    """All of it, to the end; the cache's bytes are checked after each step. Requests go by their index."""
    driver = Driver(runner, traffic.config) if beginnings is None else beginnings.listen(Driver(runner, traffic.config))
    last = max(step for step, *_ in traffic.arrivals)
    for step in range(MAX_STEPS):
        for index, (when, number, tenant) in enumerate(traffic.arrivals):
            if when == step:
                spec = replace(specimens.spec(number), request_id=str(index), tenant=tenant)
                matcher = specimens.matcher(number)
                driver.core.add_request(
                    spec, [] if matcher is None else [matcher.fork() for _ in range(spec.num_choices)]
                )
        for when, index in traffic.aborts:
            if when == step:
                driver.core.abort(str(index))
        if not driver.core.has_work and step >= last:
            return driver
        for when, place in traffic.preemptions:
            if when == step and (running := list(driver.core.scheduler._running.values())):
                driver.core.scheduler.preempt(running[place % len(running)], "growth")
        with faults() if step in traffic.failures else nullcontext():
            driver.core.step()
        status = driver.core.prefixes.status()
        assert status.num_bytes <= status.max_bytes, f"step {step}: {status}"
    raise AssertionError(f"not done after {MAX_STEPS} steps")


@dataclass(frozen=True)
class Stored:
    """A snapshot that must be there: of the first tokens of this request's prompt."""

    kind: str
    num_tokens: int
    spec: EngineRequest

    @property
    def token_ids(self) -> np.ndarray:
        return self.spec.token_ids[: self.num_tokens]


class Shelf:
    """Prefixes that a cache serves by its rules alone, one prompt after the other, if nothing is evicted."""

    def __init__(self, image_token_id: int | None, min_tokens: int, boundaries: Iterable[str]):
        self._image_token_id, self.min_tokens, self._kinds = image_token_id, min_tokens, set(boundaries)
        self.stored: dict[Any, Stored] = {}

    def serve(self, spec: EngineRequest) -> int:
        """How many tokens; and keeps what is worth keeping."""
        num_tokens = len(spec.token_ids)
        served = point = max((n for n in range(1, num_tokens) if self.key(spec, n) in self.stored), default=0)
        boundaries = [*spec.boundaries, Boundary("prompt", num_tokens - 1)]
        for kind, place in [(b.kind, b.num_tokens) for b in boundaries if b.kind in self._kinds]:
            if place >= point + self.min_tokens:
                self.stored.setdefault(self.key(spec, place), Stored(kind, place, spec))
                point = place
            if kind == "turn":  # also where it is too near: the end of the prompt does not stand in for it
                point = max(point, place)
        return served

    def key(self, spec: EngineRequest, num_tokens: int) -> Any:
        ids = spec.token_ids[:num_tokens]
        return spec.tenant, ids.tobytes(), tuple(hash_ for start, hash_ in self.pictures(spec) if start < num_tokens)

    def pictures(self, spec: EngineRequest) -> list[tuple[int, str]]:
        """Where each begins, and what it shows."""
        places = np.flatnonzero(spec.token_ids == self._image_token_id).tolist() if spec.images else []
        starts = []
        for image in spec.images:
            starts.append((places[0], image.content_hash))
            places = places[image.num_tokens :]
        return starts

    def shared(self, spec: EngineRequest, stored: Stored) -> int:
        """So many tokens are the same, and so are the pictures among them: up to a picture that differs."""
        num_tokens = common(spec.token_ids, stored.token_ids)
        pairs = zip(self.pictures(spec), self.pictures(stored.spec), strict=False)
        return min([num_tokens, *(mine[0] for mine, theirs in pairs if mine[0] < num_tokens and mine != theirs)])


@dataclass(frozen=True)
class Answer:
    """All that a row got. num_accepted: drafts, if nothing disturbed them."""

    token_ids: tuple[int, ...]
    finish: str
    error: str | None
    logprobs: tuple[TokenLogprobs, ...]
    num_drafted: int
    num_accepted: int
    num_cached: int

    @classmethod
    def of(cls, driver: Driver, name: str) -> "Answer":
        chunks = driver.chunks[name]
        (num_cached,) = {chunk.num_cached for chunk in chunks if chunk.finish_reason is not FinishReason.ERROR} or {0}
        return cls(
            tuple(driver.tokens[name]),
            driver.finish.get(name, "abort"),
            driver.errors.get(name),
            tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
            sum(chunk.num_drafted for chunk in chunks),
            sum(chunk.num_accepted for chunk in chunks),
            num_cached,
        )


def row_name(index: int, choice: int) -> str:
    return f"{index}/{choice}" if choice else str(index)


def compare_logprobs(name: str, got: tuple[TokenLogprobs, ...], cold: tuple[TokenLogprobs, ...]) -> None:
    """Compare the numbers of the alternatives, best first: tokens may differ where numbers are equal but for
    rounding."""
    assert len(got) == len(cold), name
    for mine, theirs in zip(got, cold, strict=True):
        values = [(mine.logprob, theirs.logprob), *((a[1], b[1]) for a, b in zip(mine.top, theirs.top, strict=True))]
        assert all(agree(a, b) for a, b in values), f"{name}: {mine} instead of {theirs}"


def common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differs[0]) if len(differs) else length


class Bench:
    """One model with its specimens, and what each of them gets without a cache and alone: the truth for all else."""

    def __init__(self, runner: MLXRunner, model_dir: Path):
        self.runner = runner
        self.specimens = SharedSpecimens(model_dir, runner.vocab_size, "image" in runner.capabilities["media"])
        self.figures: Counter[str] = Counter()
        self.cold = cache(self._cold)  # (number of a specimen) -> the answer of each of its choices
        self.snapshot_gb = self._snapshot_gb()

    def _cold(self, number: int) -> list[Answer]:
        driver = carry_out(self.runner, Traffic(((0, number, ""),), cache={"enabled": False}), self.specimens)
        assert driver.core.stats.num_cached_tokens == 0
        return [Answer.of(driver, row_name(0, i)) for i in range(self.specimens.spec(number).num_choices)]

    def _snapshot_gb(self) -> float:
        one = Traffic(((0, 0, ""),), cache={"min_tokens": 1})
        status = carry_out(self.runner, one, self.specimens).core.prefixes.status()
        return status.num_bytes / status.num_entries / 2**30

    @contextmanager
    def faults(self) -> Iterator[None]:
        module = self.runner._model.module
        layers = getattr(module, "language_model", module).model
        with mock.patch.object(type(layers), "__call__", side_effect=ZeroDivisionError):
            yield

    def check(self, traffic: Traffic) -> None:
        beginnings = Beginnings()
        driver = carry_out(self.runner, traffic, self.specimens, self.faults, beginnings)
        prefix, memory = driver.core.prefixes, self.runner.memory()
        assert memory["decode_cache_bytes"] == 0 and memory["prefill_cache_bytes"] == 0
        assert prefix.store.integrity_error() is None and prefix.status().num_integrity_errors == 0
        for index, (_, number, _) in enumerate(traffic.arrivals):
            for choice, cold in enumerate(self.cold(number)):
                self._compare(driver, traffic, index, choice, cold)
        if traffic.is_orderly and not beginnings.overlap:
            self._check_books(driver, traffic, list(map(int, beginnings.request_ids)))
            self.figures["orderly"] += 1
        self.figures += Counter(
            {
                "schedules": 1,
                "disturbed": bool(traffic.aborts or traffic.failures),
                "hits": prefix.status().num_hits,
                "prefilled tokens": driver.core.stats.num_prompt_tokens,
                "cached tokens": driver.core.stats.num_cached_tokens,
                "evicted": prefix.status().num_evicted,
            }
        )

    def _compare(self, driver: Driver, traffic: Traffic, index: int, choice: int, cold: Answer) -> None:
        got, name = Answer.of(driver, row_name(index, choice)), f"row {index}/{choice}, {traffic.arrivals[index]}"
        num = len(got.token_ids)
        assert got.token_ids == cold.token_ids[:num], f"{name}: {got} instead of {cold}"
        compare_logprobs(name, got.logprobs, cold.logprobs[:num])
        cut = got.finish == "abort" or "ZeroDivisionError" in (got.error or "")
        assert cut <= bool(traffic.aborts or traffic.failures), f"{name}: {got}"
        if not cut:
            assert (num, got.finish, got.error) == (len(cold.token_ids), cold.finish, cold.error), f"{name}: {got}"
        if not cut and not traffic.failures and not traffic.preemptions:  # both change which tokens are drafted
            assert got.num_accepted == cold.num_accepted, f"{name}: {got} instead of {cold}"
        self.figures += Counter({"rows": 1, "tokens": num, "accepted": got.num_accepted})

    def _check_books(self, driver: Driver, traffic: Traffic, order: Sequence[int]) -> None:
        """Check that tokens served and prefilled, and explanations of misses, follow the rules."""
        config = PrefixCacheConfig.model_validate(traffic.cache)
        shelf = Shelf(self.specimens.image_token_id, config.min_tokens or LEAST_TOKENS, config.boundaries)
        num_tokens = num_cached = 0
        misses = {miss.request_id: miss for miss in driver.core.prefixes.status().recent_misses}
        for index in order:
            _, number, tenant = traffic.arrivals[index]
            spec = replace(self.specimens.spec(number), request_id=str(index), tenant=tenant)
            stored = list(shelf.stored.values())
            served = shelf.serve(spec)
            self._check_miss(misses.get(str(index)), spec, served, stored, shelf)
            assert Answer.of(driver, str(index)).num_cached == served, f"request {index} of {traffic}"
            num_tokens, num_cached = num_tokens + len(spec.token_ids), num_cached + served
        stats, status = driver.core.stats, driver.core.prefixes.status()
        assert (stats.num_cached_tokens, stats.num_prompt_tokens) == (num_cached, num_tokens - num_cached)
        assert status.num_entries == status.num_stored == len(shelf.stored)
        kept = sorted((entry.kind, entry.num_tokens) for entry in status.entries)
        assert kept == sorted((one.kind, one.num_tokens) for one in shelf.stored.values())
        self.figures["orderly"] += 1

    def _check_miss(
        self, miss: CacheMiss | None, spec: EngineRequest, served: int, stored: list[Stored], shelf: Shelf
    ) -> None:
        """Check that the explanation of a prompt's miss is true of the snapshots that were stored."""
        own = [one for one in stored if one.spec.tenant == spec.tenant]
        lengths = [shelf.shared(spec, one) for one in own]
        # a snapshot that holds all of the prompt and more does not differ from it
        longest = max((n for n in lengths if n < len(spec.token_ids)), default=0)
        if miss is None:
            # a question that goes on otherwise soon behind what was served is another question
            assert longest < served + shelf.min_tokens and served > 0, f"nothing is told about {spec.request_id}"
            return
        self.figures[f"told: {miss.reason}"] += 1
        assert (miss.num_prompt_tokens, miss.num_cached) == (len(spec.token_ids), served), miss
        if miss.reason == "cold":
            assert longest == served == 0 and (miss.boundary, miss.boundary_tokens, miss.num_common) == (None, 0, 0)
            return
        candidates = [
            one
            for one in stored
            if (one.kind, one.num_tokens) == (miss.boundary, miss.boundary_tokens)
            and (one.spec.tenant == spec.tenant) == (miss.reason != "tenant")
            and shelf.shared(spec, one) == miss.num_common
        ]
        assert candidates and miss.boundary_tokens > served, f"{miss}: there is no such snapshot"
        assert miss.num_common > served
        assert miss.num_common == (miss.boundary_tokens if miss.reason == "tenant" else longest), miss
        num_told = len(miss.stored_token_ids)
        assert miss.prompt_token_ids == tuple(spec.token_ids[miss.num_common :][: len(miss.prompt_token_ids)])
        assert not num_told or (
            miss.reason == "text"
            and any(miss.stored_token_ids == tuple(one.token_ids[miss.num_common :][:num_told]) for one in candidates)
        ), miss


def plain_tokens(seed: Any, count: int) -> np.ndarray:
    """Text alone; the same for the same seed."""
    return np.random.default_rng(zlib.crc32(repr(seed).encode())).integers(16, 500, count).astype(np.int32)


def plain_request(name: str, *parts: np.ndarray, max_tokens: int = 12) -> EngineRequest:
    """Sampled with a seed of its own, by its name. The first of the parts is the system part."""
    sampling = SamplingParams(max_tokens, seed=zlib.crc32(name.encode()), logprobs=2)
    boundaries = (Boundary("system", len(parts[0])),)
    return EngineRequest(name, np.concatenate(parts), sampling, (), boundaries=boundaries)


def cache_config(engine: dict[str, Any] | None = None, **cache: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"mtp": DRAFTS, "prompt_lookup": "off", "prefill_chunk_tokens": 64, **(engine or {}), "prefix_cache": cache}
    )
