"""The figures that overload_bench computes from its clients' records."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.measure import Spread, percentile
from tests.support.sse import Answer, Exchange, answer, response

REFUSED = (429, 503)


@dataclass(frozen=True)
class Refusal:
    """seconds: from when the request was due to the end of its answer. retry_after: the header, None without one."""

    status: int
    seconds: float
    retry_after: str | None


@dataclass(frozen=True)
class Round:
    """One arm of one round. goodput: tokens per second. late_s: how late the client itself sent each request."""

    arm: str
    goodput: float
    answers: list[Answer]
    refusals: list[Refusal]
    errors: list[str]
    late_s: list[float]


@dataclass(frozen=True)
class Report:
    arms: list[dict[str, str]]
    lines: list[str]
    errors: list[str]


def arrivals(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """Poisson: seconds from the beginning, ascending."""
    due_s, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        due_s.append(at_s)
        at_s += rng.expovariate(rate)
    return due_s


def figures(arm: str, exchanges: Sequence[Exchange], ramp_s: float, seconds: float) -> Round:
    """Goodput counts from ramp_s to `seconds` after the first was due; all else the whole round."""
    answers, refusals, errors = [], [], []
    for each in exchanges:
        status, _ = response(each.reads)
        if each.error is None and status in REFUSED:
            refusals.append(Refusal(status, each.reads[-1][0] - each.due, header(each, "retry-after")))
            continue
        found = answer(each)
        if found.error is None:
            answers.append(found)
        else:
            errors.append(found.error)
    began = min(each.due for each in exchanges)
    late_s = [each.sent - each.due for each in exchanges if each.sent]
    goodput = tokens_between(answers, began + ramp_s, began + seconds) / (seconds - ramp_s)
    return Round(arm, goodput, answers, refusals, errors, late_s)


def tokens_between(answers: Sequence[Answer], begin: float, end: float) -> float:
    """A piece of text may be several tokens: those of an answer are taken to lie evenly in its pieces."""
    return sum(
        a.num_output_tokens * sum(begin <= at < end for at, _ in a.pieces) / len(a.pieces) for a in answers if a.pieces
    )


def header(of: Exchange, name: str) -> str | None:
    head = b"".join(data for _, data in of.reads).partition(b"\r\n\r\n")[0].decode("latin-1")
    pairs = (line.partition(":") for line in head.split("\r\n")[1:])
    return next((value.strip() for key, _, value in pairs if key.lower() == name), None)


def summary(rounds: Sequence[Round], overload: str) -> Report:
    """Ratios are within a round: the n-th of one arm by the n-th of another."""
    by_arm: defaultdict[str, list[Round]] = defaultdict(list)
    for each in rounds:
        by_arm[each.arm].append(each)
    lines = [
        f"goodput {overload} / {other}: {ratio(by_arm[overload], by_arm[other]):.3f}" for other in ("1 x", "closed")
    ]
    for arm, of_arm in by_arm.items():
        said = Counter(f"{r.status}, Retry-After {r.retry_after}" for one in of_arm for r in one.refusals)
        lines += [f"{arm}: {count} refused with {what}" for what, count in sorted(said.items())]
    errors = sorted({error for each in rounds for error in each.errors})
    lines += [f"error: {error}" for error in errors]
    return Report([_row(arm, of_arm) for arm, of_arm in by_arm.items()], lines, errors)


def ratio(above: Sequence[Round], below: Sequence[Round]) -> Spread:
    return Spread.of([a.goodput / b.goodput for a, b in zip(above, below, strict=True)])


def _row(arm: str, rounds: Sequence[Round]) -> dict[str, str]:
    def share_refused(one: Round) -> float:
        return len(one.refusals) / (len(one.refusals) + len(one.answers) + len(one.errors))

    refusals_ms = [r.seconds * 1e3 for one in rounds for r in one.refusals]
    ttft_ms = [a.ttft_s * 1e3 for one in rounds for a in one.answers if a.pieces]
    late_ms = [s * 1e3 for one in rounds for s in one.late_s]
    return {
        "arm": arm,
        "goodput, tokens/s": f"{Spread.of([one.goodput for one in rounds]):.0f}",
        "answered": str(sum(len(one.answers) for one in rounds)),
        "refused": f"{Spread.of([100 * share_refused(one) for one in rounds]):.0f} %",
        "refusal p50/p99/max, ms": _percentiles(refusals_ms, 50, 99, 100),
        "TTFT p50/p99, ms": _percentiles(ttft_ms, 50, 99),
        "sent late p99, ms": _percentiles(late_ms, 99),
        "errors": str(sum(len(one.errors) for one in rounds)),
    }


def _percentiles(values: Sequence[float], *which: float) -> str:
    return " / ".join(f"{percentile(values, q):.0f}" for q in which) if values else "-"
