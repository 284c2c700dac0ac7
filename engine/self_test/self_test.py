"""SelfTest: all checks of the engine on the device at hand, as a plain-text report."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from engine.async_engine import RunnerFactory
from engine.config import EngineConfig
from engine.core.runner import ModelRunner
from engine.processing.checkpoint import resolve_checkpoint
from engine.self_test import machine
from engine.self_test.bench import DRAFTS, FULL, Bench, Scale, changed
from engine.self_test.check_thread import Check, guarded, run_checks
from engine.self_test.memory_checks import MEMORY_CHECKS, SLACK_BYTES, weights
from engine.self_test.other_starts import Reference, async_engine, exact_drafts
from engine.self_test.outcome import NotApplicable, Outcome, Status, graded
from engine.self_test.prompts import prompts_of
from engine.self_test.speed_checks import SPEED_CHECKS
from engine.self_test.token_checks import TOKEN_CHECKS
from engine.worker import device_facts
from engine.worker.kernel_checks import KERNEL_CHECKS
from engine.worker.kernel_figure import KernelFigure
from engine.worker.model_runner import load_runner

LABEL_WIDTH = 28
MAX_LEFT_BYTES = 16 * SLACK_BYTES
CAPABILITIES = ("dtype", "media", "mtp", "mtp_exact", "compiled", "blas")
CLOSED, STREAMS, EXACT_DRAFTS = "memory after closing", "streams of AsyncEngine", "exact drafts = plain"


class SelfTest:
    """Checks an engine on this machine. Its report contains no paths of the home directory.

    Args:
        config: The engine's configuration.
        scale: How much to compute.
        make_runner: Creates runners, as for AsyncEngine.

    Attributes:
        outcomes: The outcomes so far.
    """

    def __init__(self, config: EngineConfig, scale: Scale = FULL, make_runner: RunnerFactory = load_runner):
        self.outcomes: list[Outcome] = []
        self._config = config
        self._scale = scale
        self._make_runner = make_runner
        self._reference: Reference | None = None
        self._facts: dict[str, str] = {}

    @property
    def exit_status(self) -> int:
        """1 if a check failed, else 0."""
        return int(any(outcome.status is Status.FAIL for outcome in self.outcomes))

    def lines(self) -> Iterator[str]:
        """Run all checks, and yield the lines of the report.

        Raises:
            EngineFailed: There is no such model.
        """
        resolve_checkpoint(self._config.model, self._config.revision, weights=True)
        yield "Orchard self-test"
        yield from _table({**machine.versions(), "model": machine.model_name(self._config.model)})
        for line in self._sections(device_facts.held_bytes()):
            yield machine.without_home(line)
        counts = Counter(outcome.status for outcome in self.outcomes)
        yield ""
        yield "result: " + ", ".join(f"{counts[status]} {status}" for status in Status)

    def _sections(self, before_bytes: int) -> Iterator[str]:
        """Run all checks. before_bytes: held before the model is loaded."""
        first = {
            "memory": {"weights": partial(weights, before_bytes=before_bytes), **MEMORY_CHECKS},
            "tokens": TOKEN_CHECKS,
            "speed": SPEED_CHECKS,
            "kernels": {name: partial(_kernel, name, check) for name, check in KERNEL_CHECKS.items()},
        }
        yield from self._checked(first, self._config, self._keep_reference)
        yield from _title("other starts")
        yield self._add(guarded(CLOSED, lambda: _closed(before_bytes)))
        yield self._add(guarded(STREAMS, self._streams))
        yield from self._exact_drafts()

    def _checked(
        self, sections: Mapping[str, Mapping[str, Check]], config: EngineConfig, finish: Callable[[Bench], None]
    ) -> Iterator[str]:
        """Load the model, and run the checks of all sections in order, as far as they can be run."""
        checks = {name: check for section in sections.values() for name, check in section.items()}
        titles = {next(iter(section)): title for title, section in sections.items()}
        left = list(checks)
        try:
            for outcome in run_checks(lambda: self._load(config), checks, finish):
                yield from self._titled(titles, left.pop(0))
                yield self._add(outcome)
        except Exception as error:
            yield self._add(Outcome("loading or closing", Status.FAIL, f"{type(error).__name__}: {error}", "no error"))
        for name in left:
            yield from self._titled(titles, name)
            yield self._add(Outcome(name, Status.SKIP, "the model is not loaded"))

    def _titled(self, titles: Mapping[str, str], name: str) -> Iterator[str]:
        """Yield the title of the section that begins with a check, and the device before the first one."""
        if name in titles:
            if not self.outcomes:
                yield from _table(self._facts)
            yield from _title(titles[name])

    def _load(self, config: EngineConfig) -> Bench:
        runner = self._make_runner(config, lambda progress: None)
        try:
            self._facts = self._facts or machine.device() | _capabilities(runner)
            model_dir = resolve_checkpoint(config.model, config.revision, weights=True)
            return Bench(runner, config, prompts_of(model_dir), self._scale)
        except BaseException:
            runner.close()
            raise

    def _keep_reference(self, bench: Bench) -> None:
        """Keep what the later starts are compared with; if it cannot be computed, checks have failed already."""
        with contextlib.suppress(Exception):
            self._reference = Reference.of(bench)

    def _streams(self) -> Outcome:
        return async_engine(STREAMS, self._config, self._make_runner, self._require_reference())

    def _exact_drafts(self) -> Iterator[str]:
        """Load the model with exact verification of drafts, and compare."""
        reference = self._reference
        if reference is None or reference.no_exact_drafts is not None:
            reason = "no answers to compare with" if reference is None else reference.no_exact_drafts
            yield self._add(Outcome(EXACT_DRAFTS, Status.SKIP, str(reason)))
            return
        config = changed(self._config, mtp=DRAFTS, mtp_exact="on")
        check = {EXACT_DRAFTS: partial(exact_drafts, EXACT_DRAFTS, reference)}
        yield from self._checked({"": check}, config, lambda bench: None)

    def _require_reference(self) -> Reference:
        if self._reference is None:
            raise NotApplicable("no answers to compare with")
        return self._reference

    def _add(self, outcome: Outcome) -> str:
        self.outcomes.append(outcome)
        return outcome.line


def _closed(before_bytes: int) -> Outcome:
    """See that closing the engine has freed its memory. before_bytes: held before it was loaded."""
    held = device_facts.held_bytes() - before_bytes
    value = f"{held} bytes more held than before the model was loaded"
    limit = f"at most {SLACK_BYTES}; broken beyond {MAX_LEFT_BYTES}"
    return graded(CLOSED, value, limit, good=held <= SLACK_BYTES, tolerable=held <= MAX_LEFT_BYTES)


def _kernel(name: str, check: Callable[[], KernelFigure | str], bench: Bench) -> Outcome:
    """Return the outcome of a kernel's check. bench: the model, whose patches of the libraries are installed."""
    figure = check()
    if isinstance(figure, str):
        raise NotApplicable(figure)
    tolerable = not figure.is_wrong and math.isfinite(figure.value)
    value = f"{figure.value:.1e} ({figure.what})"
    return graded(name, value, f"{figure.limit:g}", good=figure.value <= figure.limit, tolerable=tolerable)


def _capabilities(runner: ModelRunner) -> dict[str, str]:
    return {name: str(runner.capabilities[name]) for name in CAPABILITIES if name in runner.capabilities}


def _title(title: str) -> Iterator[str]:
    if title:
        yield ""
        yield title


def _table(values: Mapping[str, str]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name:<{LABEL_WIDTH}} {value}"
