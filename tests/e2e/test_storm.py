"""A storm of requests of every kind, three in ten of which are given up, and what is left of it: nothing.

ORCHARD_STORM_REQUESTS=2000 makes it long. -s prints the figures.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.logs import complaints, read_logs
from tests.e2e.server import ServeRun, serve_run
from tests.e2e.storm import Books, Visit, engine_of, plan_storm, run_storm, unrest
from tests.e2e.storm_requests import KINDS, SPARSE_TOKENS, one_of_each

pytestmark = [pytest.mark.server, pytest.mark.night("the gate abandons requests in test_cancel and test_hostile")]

NUM_REQUESTS = int(os.environ.get("ORCHARD_STORM_REQUESTS", "300"))
SEED = 7
IDLE_TIMEOUT_S = 60.0
MIB = 2**20
MAX_ACTIVE_GROWTH = MIB // 8
"""MLX's books are exact; a row of any kind holds more than that, as it has recurrent states."""
MAX_GROWTH = 48 * MIB
"""Growth of a process, without the memory that MLX keeps for reuse. On a CPU memory that MLX returns stays in malloc's
arenas for later, in holes: with a small cache for reuse their sum is soon what it will be, but for 15 MiB more or
less."""
MLX_CACHE_MB = 64
COUNTERS = ("num_finished", "num_aborted", "num_failed", "num_expired", "num_moved")


@dataclass(frozen=True)
class Figures:
    """The memory of an idle server with an empty prefix cache, in bytes. rss: by process. kept: by MLX in the engine,
    for reuse: up to mlx_cache_mb, part of its rss."""

    active: int
    kept: int
    rss: dict[str, int]

    @property
    def in_use(self) -> dict[str, int]:
        return {name: size - self.kept * name.startswith("engines") for name, size in self.rss.items()}

    def __str__(self) -> str:
        processes = ", ".join(f"{name} {size / MIB:.0f}" for name, size in self.rss.items())
        return f"MiB: active {self.active / MIB:.2f}, kept {self.kept / MIB:.0f}, rss: {processes}"


@pytest.fixture(scope="module")
def ray_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ors-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def server(ray_dir: Path) -> Iterator[ServeRun]:
    def make_it_small(config: dict[str, Any]) -> None:
        args = config["applications"][0]["args"]
        args["spec_prefill"] |= {"threshold_tokens": SPARSE_TOKENS * 3 // 4, "mlx_cache_mb": MLX_CACHE_MB}
        args["engine"]["mlx_cache_mb"] = MLX_CACHE_MB

    with serve_run(make_it_small, {"RAY_TMPDIR": str(ray_dir)}) as server:
        server.wait_complete()
        yield server
        assert server.stop() == 0, server.output[-4000:]


@pytest.fixture(scope="module")
def http(server: ServeRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as http:
        yield http


def wait_until_idle(http: httpx.Client) -> dict[str, Any]:
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while held := unrest(status := http.get("/v1/status").raise_for_status().json()):
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    return status


def figures(http: httpx.Client) -> Figures:
    """The memory figures are read in a step, so there must be one behind the clearing."""
    http.delete("/v1/cache").raise_for_status()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    status = wait_until_idle(http)
    rss = {
        f"{name} {replica['pid']}": replica["rss_bytes"]
        for name in ("engines", "ingress", "text", "mllm", "spec_prefill")
        for replica in status[name]
    }
    memory = engine_of(status)["memory"]
    return Figures(memory["active_bytes"], memory["mlx_cache_bytes"], rss)


def check_counters(before: dict[str, Any], after: dict[str, Any], books: Books) -> None:
    begun = {name: value - before[name] for name, value in after.items() if name.startswith("num_")}
    num_ended = sum(begun[name] for name in COUNTERS)
    assert books.least_rows <= num_ended <= books.most_rows, (begun, books)
    assert begun["num_failed"] == begun["num_expired"] == 0, begun
    assert begun["num_finished"] >= books.finished_rows, (begun, books)
    assert begun["num_output_tokens"] >= books.num_output_tokens, (begun, books)
    assert 0 <= begun["num_accepted"] <= begun["num_drafted"], begun
    assert begun["num_cached_tokens"] >= books.num_cached_tokens, (begun, books)
    assert begun["num_sparse"] >= books.num_sparse, (begun, books)
    taken_in = begun["num_prompt_tokens"] + begun["num_cached_tokens"] + begun["num_skipped_tokens"]
    assert taken_in >= books.num_prompt_tokens, (begun, books)


def send_wave(server: ServeRun, http: httpx.Client, wave: list[Visit], texts: dict[str, tuple[str, ...]]) -> Books:
    books, before = Books(texts), wait_until_idle(http)
    for visit, talk in zip(wave, run_storm(f"{server.base_url}/v1", wave), strict=True):
        books.add(visit, talk)
    assert not books.problems, "\n".join(books.problems[:10])
    check_counters(engine_of(before), engine_of(wait_until_idle(http)), books)
    return books


def test_storm_of_requests_leaves_no_growth_error_or_lost_process(server: ServeRun, http: httpx.Client, ray_dir: Path):
    texts: dict[str, tuple[str, ...]] = {}
    first = send_wave(server, http, [Visit(-i, ask, None) for i, ask in enumerate(one_of_each(SEED), 1)], texts)
    assert set(first.kinds) - {""} == set(KINDS) - {"invalid"} and first.num_sparse
    waves, seen = [], [figures(http)]
    for wave in plan_storm(NUM_REQUESTS, 3, SEED):
        began_s = time.monotonic()
        waves.append(send_wave(server, http, wave, texts))
        print(f"\n{len(wave)} requests in {time.monotonic() - began_s:.0f} s: {dict(waves[-1].outcomes)}")  # noqa: T201
        seen.append(figures(http))
    kinds = sum((books.kinds for books in waves), Counter())
    print(f"whole: {dict(kinds)}; {sum(w.num_repeated for w in waves)} repeated", *seen, sep="\n")  # noqa: T201
    assert all(books.least_rows == books.most_rows for books in (first, waves[-1])), "counted exactly"
    assert [each["num_refused"] for each in wait_until_idle(http)["ingress"]] == [0]
    assert http.get("/v1/cache").json()["totals"]["integrity_errors"] == 0
    *_, second, third = seen
    assert set(seen[0].rss) == set(third.rss), "a process was replaced"
    assert third.active <= second.active + MAX_ACTIVE_GROWTH, seen
    assert all(size <= second.in_use[name] + MAX_GROWTH for name, size in third.in_use.items()), seen
    assert not (found := complaints(read_logs(server, ray_dir))), found[0]
    assert any(path.parent.name == "serve" for path in ray_dir.rglob("*.log")), "that is where they are written"
