"""Rows of the table against a server that streams ordinary answers meanwhile, and what is left of it: nothing.

-s prints the figures. Rows can be chosen with -k.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.hostile.attack import Outcome, attack
from tests.e2e.hostile.background import Background, Seen
from tests.e2e.hostile.processes import MIB, Peaks, ProcessFigures, find_processes, look_at
from tests.e2e.hostile.rows import Http, Row
from tests.e2e.hostile.table import GROUPS, TABLE
from tests.e2e.logs import complaints, read_logs
from tests.e2e.pictures import about, image_part, shape
from tests.e2e.server import Server
from tests.e2e.storm import unrest
from tests.support.night import some_at_night

pytestmark = pytest.mark.server

IN_ONE_PROCESS = "the gate sends it to the graph in one process: tests/golden/test_golden.py"
NUM_ROWS = 150
SETTLE_S = 60.0
MAX_GAP_S = 30.0
"""Longest gap of the background stream, on a machine with two cores that are shared. The figures are printed."""
MAX_GROWTH = 400 * MIB
"""Growth of a process that has decoded, tokenized and parsed the largest inputs: malloc keeps some of it for later."""
MAX_NEW_FDS = 24
MAX_NEW_WORKERS = 4


def over_http() -> list[Row]:
    """The rows that need connections of their own, and the first of each limit."""
    first_of_limit = {row.limit: row for row in reversed(TABLE)}.values()
    return [row for row in TABLE if not isinstance(row.request, Http) or row in first_of_limit]


OVER_HTTP = over_http()


@dataclass(frozen=True)
class Aftermath:
    """A whole run of the table. peaks: of each process and its workers, in bytes."""

    outcomes: dict[str, Outcome]
    seen: Seen
    before: dict[str, ProcessFigures]
    peaks: dict[str, int]
    logs_before: dict[str, str]


def warm_up(http: httpx.Client) -> None:
    """Every process has then done its usual work once. Images may have to wait for their planner, which starts late."""
    for messages in (
        [{"role": "user", "content": "What is 12 + 30?"}],
        about("What is in the image?", image_part(shape("red", "circle"))),
    ):
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 32}
        deadline = time.monotonic() + SETTLE_S
        while (response := http.post("/v1/chat/completions", json=body)).status_code == 503:
            assert time.monotonic() < deadline, response.text
            time.sleep(float(response.headers["retry-after"]))
        response.raise_for_status()


def at_rest(http: httpx.Client) -> dict[str, Any]:
    """The status of a server without cached prefixes; figures of memory are read in a step, so there is one first."""
    settled(http)
    http.delete("/v1/cache").raise_for_status()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    settled(http)
    return http.get("/v1/status").raise_for_status().json()


def settled(http: httpx.Client) -> list[str]:
    """Return the resources still in use after a while without any client; there should be none."""
    deadline = time.monotonic() + SETTLE_S
    while held := unrest(http.get("/v1/status").raise_for_status().json()):
        if time.monotonic() > deadline:
            return held
        time.sleep(0.2)
    return []


@pytest.fixture(scope="module")
def aftermath(server: Server, http: httpx.Client, request: pytest.FixtureRequest) -> Iterator[Aftermath]:
    chosen = [item.callspec.params["row"] for item in request.session.items if _is_row(item)]  # pyright: ignore
    warm_up(http)
    status = at_rest(http)
    processes = find_processes(status, server.pid)
    before, logs = look_at(processes, status), read_logs(server, server.ray_dir)
    background, peaks = Background(server.base_url), Peaks(processes)
    peaks.start()
    began_s = time.monotonic()
    outcomes = asyncio.run(attack(server.base_url, chosen or TABLE))
    lasted_s = time.monotonic() - began_s
    yield (after := Aftermath(outcomes, background.end(), before, peaks.end(), logs))
    _print_figures(after, look_at(processes, at_rest(http)), lasted_s)


def _is_row(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function)
        and item.originalname == test_hostile_request_gets_the_expected_answer.__name__
    )


def _print_figures(after: Aftermath, left: dict[str, ProcessFigures], lasted_s: float) -> None:
    slowest = sorted(after.outcomes.items(), key=lambda pair: -pair[1].lasted_s)[:12]
    lines = [
        f"\n{len(after.outcomes)} rows in {lasted_s:.0f} s: { {name: len(rows) for name, rows in GROUPS.items()} }",
        f"background: {after.seen}",
        *(f"{name}: before {after.before[name]}; peak with workers {after.peaks[name] / MIB:.0f} MiB; after {held}"
          for name, held in left.items()),
        "slowest: " + ", ".join(f"{name} {outcome.lasted_s:.1f} s" for name, outcome in slowest),
    ]  # fmt: skip
    print("\n".join(lines))  # noqa: T201


def test_table_of_hostile_requests_is_long_and_has_unique_names():
    names = [row.name for row in TABLE]
    assert len(names) >= NUM_ROWS
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]


@pytest.mark.parametrize("row", some_at_night(TABLE, OVER_HTTP, IN_ONE_PROCESS), ids=lambda row: row.name)
def test_hostile_request_gets_the_expected_answer(row: Row, aftermath: Aftermath):
    row.check(aftermath.outcomes[row.name].replies)


def test_ordinary_answers_are_right_and_prompt_during_hostile_requests(aftermath: Aftermath):
    seen = aftermath.seen
    assert not seen.problems, seen.problems[:10]
    assert max(seen.gaps_s) < MAX_GAP_S, str(seen)


def test_server_is_idle_and_ready_after_hostile_requests(aftermath: Aftermath, http: httpx.Client):
    assert not (held := settled(http)), held
    assert http.get("/health/ready").status_code == 200


def test_processes_survive_hostile_requests_without_growth(aftermath: Aftermath, http: httpx.Client, server: Server):
    status = at_rest(http)
    before, after = aftermath.before, look_at(find_processes(status, server.pid), status)
    assert {name: held.pid for name, held in after.items()} == {name: held.pid for name, held in before.items()}
    grown = {name: f"{before[name]} -> {held}" for name, held in after.items()}
    for name, held in after.items():
        assert held.in_use < before[name].in_use + MAX_GROWTH, grown
        assert held.num_fds < before[name].num_fds + MAX_NEW_FDS, grown
        assert held.num_workers < before[name].num_workers + MAX_NEW_WORKERS, grown


def test_logs_have_no_error_after_hostile_requests(aftermath: Aftermath, server: Server):
    assert not (found := complaints(read_logs(server, server.ray_dir), aftermath.logs_before)), found[0]


def test_text_and_image_are_answered_after_hostile_requests(aftermath: Aftermath, http: httpx.Client):
    said = []
    for messages in (
        [{"role": "user", "content": "What is 12 + 30?"}],
        about("What is in the image?", image_part(shape("blue", "square"))),
    ):
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 32}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        said.append(answer["choices"][0]["message"]["content"])
    assert "42" in said[0] and "blue square" in said[1], said
