"""KINDS: the golden files, one per kind of request, with the requests whose answers they freeze."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.clients.captured import Captured, distinct, load
from tests.e2e.hostile.attack import Outcome
from tests.e2e.hostile.replies import Reply
from tests.e2e.hostile.rows import Http, Row
from tests.e2e.hostile.table import GROUPS
from tests.golden import one_process, recorded
from tests.golden.exchange import Exchange, exchange

FILES = Path(__file__).parent / "files"

UNFROZEN = {"16 URLs of one dead host": "the error names the image whose connection failed first"}
"""Hostile rows with several right answers, and why."""

NOW = ("work", "queue", "answers")
"""Keys of a status page that depend on the requests of this moment, or on those before it."""


@dataclass(frozen=True)
class Kind:
    """A golden file.

    Attributes:
        name: Of the file, without its suffix.
        title: First line of the file.
        small: Sends the requests; the answers by name.
        large: The same for requests that take memory or seconds; the gate sends none of them.
    """

    name: str
    title: str
    small: Callable[[], Mapping[str, Exchange]]
    large: Callable[[], Mapping[str, Exchange]] = lambda: {}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Send all requests; return the answers by name."""
        return {**self.small(), **self.large()}

    @property
    def path(self) -> Path:
        return FILES / f"{self.name}.txt"


def well_formed(rows: Sequence[Row], is_large: bool) -> list[Row]:
    """Return the rows that need no connection of their own: those with the cost `large`, or all others."""
    return [row for row in rows if isinstance(row.request, Http) and (row.cost == "large") == is_large]


@cache
def hostile_outcomes(is_large: bool) -> dict[str, Outcome]:
    """Return what the graph in one process answers to all well-formed rows, large or not; sent once per process."""
    return one_process.send([row for rows in GROUPS.values() for row in well_formed(rows, is_large)])


def _hostile(rows: Sequence[Row], is_large: bool) -> dict[str, Exchange]:
    frozen = [row for row in well_formed(rows, is_large) if row.name not in UNFROZEN]
    outcomes = hostile_outcomes(is_large) if frozen else {}
    return {row.name: _frozen(row, reply) for row in frozen for reply in outcomes[row.name].replies}


def _frozen(row: Row, reply: Reply) -> Exchange:
    """Freeze an answer; a page of figures, which are never the same, by the names of its figures."""
    assert isinstance(row.request, Http)
    is_page = row.request.path.partition("?")[0] in ("/v1/status", "/v1/cache") and reply.status == 200
    if not is_page:
        return exchange(reply.status, reply.headers, reply.body)
    headers = [(name, value) for name, value in reply.headers if name != "content-length"]
    return exchange(reply.status, headers, json.dumps(_names(reply.json())).encode())


def _names(value: Any) -> Any:
    """Return the keys of a JSON value with the types of the others, without numbers of rows and what runs now."""
    if isinstance(value, dict):
        return {key: _names(item) for key, item in sorted(value.items()) if not key.isdecimal() and key not in NOW}
    if isinstance(value, list):
        return [_names(item) for item in value[:1]]
    return type(value).__name__


def _recorded(client: str) -> dict[str, Exchange]:
    exchanges: dict[str, Exchange] = {}
    for one, response in recorded.send(distinct(client)):
        name = f"{one.case} {one.n} {one.method} {one.path}"
        exchanges[name] = exchange(response.status_code, _headers(response), response.content)
    return exchanges


def _headers(response: httpx.Response) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers.raw]


def _openapi() -> dict[str, Exchange]:
    """The document with one value a line, in the order in which it is sent."""
    asked = Captured("browser", "", "document", 1, "GET", "/openapi.json", "", {}, None)
    [(_, response)] = recorded.send([asked])
    body = json.dumps(response.json(), indent=1, ensure_ascii=False)
    return {"GET /openapi.json": Exchange(response.status_code, exchange(0, _headers(response), b"").headers, body)}


def kinds() -> Iterator[Kind]:
    for group, rows in GROUPS.items():
        if well_formed(rows, False) or well_formed(rows, True):
            name = f"hostile {group}".replace(" ", "_")
            small, large = (partial(_hostile, rows, is_large) for is_large in (False, True))
            yield Kind(name, f"Answers to hostile requests: {group}.", small, large)
    for client in sorted({one.client for one in load()}):
        title = f"Answers of a scripted backend to requests of a real client: {client}."
        yield Kind(f"recorded_{client}", title, lambda client=client: _recorded(client))
    yield Kind("openapi", "The OpenAPI document.", _openapi)


KINDS: dict[str, Kind] = {kind.name: kind for kind in kinds()}
