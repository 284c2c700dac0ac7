"""Refuses one field of a program's requests at a time, with the server's error messages, and records its reaction."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.http.anthropic import phrases
from deployments.http.errors import ModelNotFound
from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from tests.e2e.programs.catalogue import Case
from tests.e2e.programs.install import Installed
from tests.e2e.programs.outcome import fields_to_refuse
from tests.e2e.programs.recorder import Exchange, Refuse
from tests.e2e.programs.run import Run, Site

LIMIT_S = 90.0
RETRY_AFTER_S = 1.0


@dataclass
class Once:
    """Refuses the first generation alone."""

    error: Exception
    _is_done: bool = field(default=False, init=False)

    def __call__(self, exchange: Exchange) -> Exception | None:
        if self._is_done or not exchange.is_generation:
            return None
        self._is_done = True
        return self.error


@dataclass(frozen=True)
class Always:
    """Refuses every generation."""

    error: Exception

    def __call__(self, exchange: Exchange) -> Exception | None:
        return self.error if exchange.is_generation else None


@dataclass(frozen=True)
class WithField:
    """Refuses every generation that has a field."""

    name: str

    def __call__(self, exchange: Exchange) -> Exception | None:
        if not exchange.is_generation or self.name not in exchange.body:
            return None
        if exchange.path == "/v1/messages":
            return phrases.wrong(self.name, phrases.NOT_PERMITTED)
        return InvalidRequest(f"`{self.name}` is not supported.", self.name)


def refused_runs(site: Site, case: Case, installed: Installed) -> Iterator[tuple[str, Run]]:
    """Yield what is refused, and the run. The fields are those of a run in which nothing is refused."""
    plain = site.run(case, installed, limit_s=LIMIT_S)
    refusals: dict[str, Refuse] = {
        "one request: the queue is full": Once(
            Overloaded("The queue is full: 256 of 256 requests wait.", RETRY_AFTER_S)
        ),
        "all: the prompt does not fit": Always(ContextLengthExceeded(40000, 1, 32768)),
        "all: the model's name": Always(ModelNotFound(case.model, "another")),
        **{f"`{name}`": WithField(name) for name in fields_to_refuse(plain.exchanges)},
    }
    for what, refuse in refusals.items():
        yield what, site.run(case, installed, refuse, LIMIT_S)
