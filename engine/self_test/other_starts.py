"""Checks that start the engine again: on the thread of AsyncEngine, and with drafts that are verified exactly."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.async_engine import AsyncEngine, RunnerFactory
from engine.config import EngineConfig
from engine.protocol import EngineRequest
from engine.self_test.agreement import Answer, Rounding, agree
from engine.self_test.bench import PLAIN, Bench, changed
from engine.self_test.core_run import answer_of
from engine.self_test.outcome import Outcome, Status, graded
from engine.self_test.token_checks import one_row, with_drafts
from engine.worker.devices import device_kind
from engine.worker.language_model import NO_EXACT_VERIFIER


@dataclass(frozen=True)
class Reference:
    """What the first engine gave.

    Attributes:
        requests: Greedy requests.
        answers: Their answers alone, by request id.
        rounding: How much rounding moves logprobs.
        no_exact_drafts: Why no drafts can be verified exactly, None if they can.
    """

    requests: Sequence[EngineRequest]
    answers: Mapping[str, Answer]
    rounding: Rounding
    no_exact_drafts: str | None

    @classmethod
    def of(cls, bench: Bench) -> "Reference":
        """Return the first requests and their answers."""
        requests = bench.questions[:3]
        reason = bench.runner.no_drafts.get("mtp")
        if reason is None and NO_EXACT_VERIFIER in bench.runner.capabilities["mtp_exact"]:
            reason = NO_EXACT_VERIFIER
        return cls(requests, bench.alone(*requests), bench.rounding, reason)


def async_engine(name: str, config: EngineConfig, make_runner: RunnerFactory, reference: Reference) -> Outcome:
    """Stream the answers of requests that arrive together from an AsyncEngine, against those of the first engine."""
    answers = asyncio.run(_streamed(changed(config, **PLAIN), make_runner, reference.requests))
    return agree(reference.answers, answers).outcome(name, reference.rounding)


async def _streamed(
    config: EngineConfig, make_runner: RunnerFactory, requests: Sequence[EngineRequest]
) -> dict[str, Answer]:
    engine = AsyncEngine(config, make_runner)
    try:
        await engine.wait_ready()
        return dict(await asyncio.gather(*(_answer(engine, request) for request in requests)))
    finally:
        await engine.shutdown()


async def _answer(engine: AsyncEngine, request: EngineRequest) -> tuple[str, Answer]:
    return request.request_id, answer_of([chunk async for chunk in engine.generate(request)])


def exact_drafts(name: str, reference: Reference, bench: Bench) -> Outcome:
    """Verify drafts with kernels that round as those for one token do (`mtp_exact: on`), against plain decoding.

    On Metal the library's exact verifier promises the very logprobs of plain decoding.
    """
    requests = tuple(reference.requests)
    found = agree({**reference.answers, **one_row(reference.answers)}, with_drafts(bench, requests))
    outcome = found.outcome(name, reference.rounding)
    if device_kind() != "metal" or reference.rounding.is_exact:
        return outcome
    good, tolerable = found.shift == 0 and outcome.status is Status.PASS, outcome.status is not Status.FAIL
    return graded(outcome.name, outcome.value, "equal logprobs", good=good, tolerable=tolerable)
