"""Everything that can go wrong with a request on its way through the engine, while two others are there.

One decodes already, one waits behind it. Whatever happens, everybody is answered, nobody else feels it but the rows of
a failed step, and afterwards nothing is left: no row, no reservation, not one byte.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineFailed
from engine.protocol import EngineRequest, FinishReason
from tests.support.faults import Armed, Failing, Faults, Meanwhile, nothing
from tests.support.faulty_engine import (
    DRAFTS,
    NUM_CHUNKS,
    NUM_SYSTEM,
    PLAIN,
    REGEX,
    RUNS,
    THREE,
    TINY,
    WAITS,
    Bench,
    Reader,
    Scene,
    tokens,
    with_picture,
)
from tests.support.night import some_at_night

PICTURE = with_picture()


@pytest.fixture(scope="module")
def benches(tiny_model: Callable[..., Path]) -> Iterator[dict[str, Bench]]:
    path = tiny_model(**TINY)
    benches = {"drafts": Bench(path, mtp=DRAFTS), "no drafts": Bench(path, mtp="off")}
    for bench in benches.values():
        bench.state = bench.run(bench.look)  # with the other one there
    yield benches
    for bench in benches.values():
        bench.close()


@pytest.fixture(scope="module")
def bench(benches: dict[str, Bench]) -> Bench:
    return benches["drafts"]


@dataclass(frozen=True)
class Moment:
    """A call of a seam that is about the victim."""

    seam: str
    call: int = 1
    request: EngineRequest = PLAIN

    def arm(self, faults: Faults, do: Callable[[], None], phase: Any) -> Armed:
        behind = None
        if self.seam == "decode":  # of all three; that speaks of nobody
            behind = faults.arm("join", nothing, of="waits", phase="after")
        of = None if self.seam in ("decode", "encode") else "victim"
        return faults.arm(self.seam, do, call=self.call, phase=phase, of=of, behind=behind)


IN_PROMPT = {
    "first chunk": Moment("prefill"),
    "behind a snapshot": Moment("prefill", 5),
    "last chunk of three": Moment("prefill", NUM_CHUNKS, THREE),
    "picture": Moment("encode", 1, PICTURE),
    "join": Moment("join"),
    "second of three joins": Moment("join", 2, THREE),
}
IN_DECODE = {
    "step": Moment("decode", 2),
    "step of three": Moment("decode", 2, THREE),
    "step with a grammar": Moment("decode", 2, REGEX),
}
ON_THE_WAY = {
    "snapshot": Moment("snapshot", 1),
    "mask": Moment("masks", 3, REGEX),
    "advance": Moment("advance", 3, REGEX),
    "first tokens go out": Moment("publish", 1),
    "tokens go out": Moment("publish", 3),
}


ENDS_HERE = {
    name: (IN_PROMPT | IN_DECODE | ON_THE_WAY)[name]
    for name in ("first chunk", "picture", "join", "step of three", "snapshot", "mask", "first tokens go out")
}


def moments(*tables: dict[str, Moment], gate: Sequence[str] | None = None) -> Any:
    """gate: The moments that the gate has, None for all."""
    every = {name: moment for table in tables for name, moment in table.items()}
    chosen = list(every.values()) if gate is None else [every[name] for name in gate]
    reason = "the gate aborts at all moments, and cancels at one of each kind"
    return pytest.mark.parametrize("moment", some_at_night(every.values(), chosen, reason), ids=list(every))


before_and_after = pytest.mark.parametrize("phase", ["before", "after"])


def num_rows(request: EngineRequest) -> int:
    """Return the number of rows of a scene with this victim."""
    return 2 + request.num_choices


async def assert_bystanders_feel_nothing(bench: Bench, scene: Scene) -> None:
    assert await bench.is_undisturbed(scene.runs, RUNS), scene.runs.errors
    assert await bench.is_undisturbed(scene.waits, WAITS), scene.waits.errors


def assert_failed(reader: Reader, why: str) -> None:
    assert reader.refusal is None and set(reader.reasons) == {FinishReason.ERROR}
    assert all(error is not None and why in error and "inside a library" not in error for error in reader.errors)


async def assert_prefixes(bench: Bench, reader: Reader, request: EngineRequest) -> None:
    """Check that the tokens received are a prefix of those that the request gets alone."""
    for got, whole in zip(reader.tokens, await bench.alone(request), strict=True):
        assert got == whole[: len(got)]


@before_and_after
@moments(IN_PROMPT)
def test_a_prompt_that_fails_ends_its_request_alone(bench: Bench, moment: Moment, phase: str):
    async def test() -> None:
        async with bench.scene(moment.request) as scene:
            fault = moment.arm(bench.faults, Failing(), phase)
            await scene.go()
        assert fault.num_fired == 1
        assert_failed(scene.victim, "prefill failed: Injected")
        assert not any(scene.victim.tokens), "nobody has seen a first token of a prompt that failed"
        await assert_bystanders_feel_nothing(bench, scene)
        kept = {entry.num_tokens for entry in (await bench.engine.cache_status()).entries}
        assert kept == {len(WAITS.token_ids) - 1}, "nobody goes on from what a failed prompt has left"
        await bench.check(moment.request, num_rows(moment.request))

    bench.run(test)


@before_and_after
@pytest.mark.parametrize("call", [1, 2])
def test_a_snapshot_that_cannot_be_taken_costs_no_answer(bench: Bench, call: int, phase: str):
    async def test() -> None:
        rejected = (await bench.engine.cache_status()).num_rejected
        async with bench.scene(PLAIN) as scene:
            fault = Moment("snapshot", call).arm(bench.faults, Failing(), phase)
            await scene.go()
        assert fault.num_fired == 1 and await bench.is_undisturbed(scene.victim, PLAIN)
        assert (await bench.engine.cache_status()).num_rejected == rejected + 1, "it is counted"
        await assert_bystanders_feel_nothing(bench, scene)
        await bench.check(PLAIN, num_rows(PLAIN))

    bench.run(test)


LIKE_IT = replace(
    PLAIN, request_id="before", token_ids=np.concatenate([PLAIN.token_ids[:NUM_SYSTEM], tokens("another question", 9)])
)
"""Leaves the state of the system part."""


@before_and_after
def test_a_snapshot_that_cannot_be_restored_costs_no_answer(bench: Bench, phase: str):
    async def test() -> None:
        unusable = (await bench.engine.cache_status()).num_unusable
        async with bench.scene(PLAIN, before=[LIKE_IT]) as scene:
            fault = Moment("restore").arm(bench.faults, Failing(), phase)
            await scene.go()
        assert fault.num_fired == 1
        assert await bench.is_undisturbed(scene.victim, PLAIN), scene.victim.errors
        assert (await bench.engine.cache_status()).num_unusable == unusable + 1, "it is counted"
        await assert_bystanders_feel_nothing(bench, scene)
        await bench.check(PLAIN, num_rows(PLAIN))

    bench.run(test)


@pytest.mark.parametrize(
    ("drafts", "name", "phase"),
    [
        ("drafts", "step", "before"),
        ("drafts", "step of three", "after"),
        ("drafts", "step with a grammar", "before"),
        ("no drafts", "step", "after"),
        ("no drafts", "step of three", "before"),
        ("no drafts", "step with a grammar", "after"),
    ],
)
def test_a_failed_step_ends_its_rows_and_a_prompt_in_progress_continues(
    benches: dict[str, Bench], drafts: str, name: str, phase: str
):
    """The step fails while `waits` is in the middle of its prompt."""
    here, moment = benches[drafts], IN_DECODE[name]

    async def test() -> None:
        async with here.scene(moment.request) as scene:
            joined = here.faults.arm("join", nothing, call=moment.request.num_choices, of="victim", phase="after")
            fault = here.faults.arm("decode", Failing(), call=moment.call, phase=phase, behind=joined)
            await scene.go()
        assert fault.num_fired == 1
        for reader, request in ((scene.runs, RUNS), (scene.victim, moment.request)):
            assert_failed(reader, "decode step failed: Injected")
            await assert_prefixes(here, reader, request)
        assert await here.is_undisturbed(scene.waits, WAITS), scene.waits.errors
        await here.check(moment.request, num_rows(moment.request))

    here.run(test)


@moments(IN_DECODE)
def test_a_failed_step_ends_all_rows_that_were_in_it(bench: Bench, moment: Moment):
    async def test() -> None:
        async with bench.scene(moment.request) as scene:
            fault = moment.arm(bench.faults, Failing(), "after")
            await scene.go()
        assert fault.num_fired == 1
        for reader, request in ((scene.runs, RUNS), (scene.victim, moment.request), (scene.waits, WAITS)):
            assert_failed(reader, "decode step failed: Injected")
            await assert_prefixes(bench, reader, request)
        await bench.check(moment.request, num_rows(moment.request))

    bench.run(test)


async def leave(bench: Bench, reader: Reader, how: str) -> None:
    if how == "abort":
        assert bench.engine.abort(reader.name), "it is known"
    else:
        await (reader.cancel() if how == "cancel" else reader.close())


async def assert_has_left(bench: Bench, reader: Reader, request: EngineRequest, how: str) -> None:
    await assert_prefixes(bench, reader, request)
    if how == "abort":
        assert set(reader.reasons) == {FinishReason.ABORT} and reader.refusal is None
        assert not bench.engine.abort(reader.name), "it is known no more"
    else:
        assert reader.task.cancelled() or reader.task.done()
        assert not reader.ends


def leaves_at(
    bench: Bench, moment: Moment, how: str, phase: str, before: tuple[EngineRequest, ...] = (), pauses: bool = False
) -> None:
    async def test() -> None:
        async with bench.scene(moment.request, before, pauses=pauses) as scene:
            fault = moment.arm(bench.faults, Meanwhile(lambda: leave(bench, scene.victim, how)), phase)
            await scene.go()
        assert fault.num_fired == 1
        await assert_has_left(bench, scene.victim, moment.request, how)
        await assert_bystanders_feel_nothing(bench, scene)
        await bench.check(moment.request, num_rows(moment.request), moment.request.num_choices)

    bench.run(test)


@moments(IN_PROMPT, IN_DECODE, ON_THE_WAY)
def test_an_aborted_request_is_removed_at_once_without_effect_on_other_requests(bench: Bench, moment: Moment):
    leaves_at(bench, moment, "abort", "before")


@moments(ENDS_HERE, gate=("picture", "join", "mask", "first tokens go out"))
def test_a_cancelled_request_is_removed_at_once_without_effect_on_other_requests(bench: Bench, moment: Moment):
    leaves_at(bench, moment, "cancel", "after")


@pytest.mark.parametrize(("how", "phase"), [("abort", "after"), ("cancel", "before")])
@moments({name: IN_PROMPT[name] for name in ("last chunk of three", "second of three joins")})
def test_a_request_aborted_while_its_rows_join_the_batch_is_removed_at_once(
    bench: Bench, moment: Moment, how: str, phase: str
):
    leaves_at(bench, moment, how, phase)


@before_and_after
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_aborted_while_its_prefix_is_restored_releases_the_snapshot(bench: Bench, how: str, phase: str):
    leaves_at(bench, Moment("restore"), how, phase, before=(LIKE_IT,))


@moments(IN_DECODE)
def test_a_request_whose_stream_is_closed_between_two_chunks_is_removed_at_once(bench: Bench, moment: Moment):
    leaves_at(bench, moment, "close", "before", pauses=True)


@pytest.mark.parametrize("where", ["inbox", "queue"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_aborted_before_its_prefill_leaves_no_trace(bench: Bench, how: str, where: str):
    """The inbox: the device thread has not yet heard of the request."""

    async def test() -> None:
        async with bench.scene(THREE) as scene:
            fault = Moment("prefill", 2).arm(bench.faults, Meanwhile(lambda: leave(bench, scene.waits, how)), "before")
            if where == "inbox":
                fault.do = nothing
                await leave(bench, scene.waits, how)
            await scene.go()
        assert fault.num_fired == 1
        await assert_has_left(bench, scene.waits, WAITS, how)
        assert not any(scene.waits.tokens)
        assert await bench.is_undisturbed(scene.runs, RUNS) and await bench.is_undisturbed(scene.victim, THREE)
        await bench.check(THREE, num_rows(THREE), 1)

    bench.run(test)


@before_and_after
@pytest.mark.parametrize("call", [1, 3])
def test_an_answer_after_a_failed_publication_is_complete_or_ends_with_an_error(bench: Bench, call: int, phase: str):
    """Some may be lost: whoever goes on as if nothing were missing has got a wrong answer."""
    other = bench.another()

    async def test() -> None:
        async with other.scene(PLAIN) as scene:
            fault = Moment("publish", call).arm(other.faults, Failing(), phase)
            await scene.go()
        assert fault.num_fired == 1
        for reader, request in ((scene.runs, RUNS), (scene.victim, PLAIN), (scene.waits, WAITS)):
            assert reader.refusal is None
            assert set(reader.reasons) == {FinishReason.ERROR} or await other.is_undisturbed(reader, request)
            await assert_prefixes(other, reader, request)
        if other.engine.status().state == "ready":
            await other.check(PLAIN, num_rows(PLAIN))
            return
        with pytest.raises(EngineFailed, match="Injected"):
            other.engine.check_health()
        with pytest.raises(EngineFailed, match="Injected"):
            await other.read(PLAIN)

    with other:
        other.run(test)
