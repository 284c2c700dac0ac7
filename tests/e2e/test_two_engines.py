"""Two engines on one node, as on a machine with two GPUs; here on its CPU."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import ServeRun, serve_run

pytestmark = [pytest.mark.server, pytest.mark.night("unit tests keep routing and shares; two engines start in minutes")]

NODE_HEADER, NODE_NOTE = "X-Orchard-Node", ": X-Orchard-Node: "
WAIT_S = 150.0
NUM_STREAMS, NUM_TOKENS = 4, 600
DISK_GB = 1.0


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeRun]:
    def change(config: dict[str, Any]) -> None:
        args = config["applications"][0]["args"]
        disk = tmp_path_factory.mktemp("snapshots")
        args["engines_per_node"] = 2
        args["engine"].update(device="cpu", prefix_cache={"disk": {"path": str(disk), "max_gb": DISK_GB}})
        args["spec_prefill"] = {"enabled": False}

    with serve_run(change) as server:
        server.wait_ready()
        poll(lambda: len(engines_of(server)) == 2, "two engines are ready", server)
        yield server
        assert server.stop() == 0, server.output[-4000:]


def poll(condition: Callable[[], bool], expected: str, server: ServeRun) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"after {WAIT_S:g} s not yet: {expected}\n{server.output[-4000:]}"
        time.sleep(0.2)


def status_of(server: ServeRun) -> dict[str, Any]:
    return httpx.get(f"{server.base_url}/v1/status", timeout=30).json()


def engines_of(server: ServeRun) -> dict[str, dict[str, Any]]:
    """Return the engines that are ready, by their ids."""
    return {one["engine_id"]: one for one in status_of(server)["engines"] if one["engine"]["state"] == "ready"}


def ask(server: ServeRun, messages: list[dict[str, str]], num_tokens: int = 8) -> httpx.Response:
    exactly = {"max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0}
    body = {"model": "demo", "messages": messages, **exactly}
    response = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    return response


def timeline_of(server: ServeRun, answer_id: str) -> dict[str, Any]:
    return httpx.get(f"{server.base_url}/v1/requests/{answer_id}", timeout=30).json()


def moves_of(server: ServeRun, stream: "Stream") -> list[str]:
    """Return the engines at which an answer went on."""
    phases = timeline_of(server, stream.id)["phases"]
    return [phase["node_id"] for phase in phases if phase["name"] == "move"]


class Stream(threading.Thread):
    """One streamed answer; it notes the engine that it begins at."""

    def __init__(self, server: ServeRun, name: str):
        super().__init__(daemon=True)
        self._url, self._name = f"{server.base_url}/v1/chat/completions", name
        self.engines: list[str] = []
        self.id = self.text = ""
        self.error: object = None

    def run(self) -> None:
        messages = [{"role": "user", "content": f"Tell me all about {self._name}."}]
        exactly = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 0}
        body = {"model": "demo", "messages": messages, "stream": True, **exactly}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=WAIT_S) as response:
                self.engines += [one for one in [response.headers.get(NODE_HEADER)] if one]
                for line in response.iter_lines():
                    self._read(line)
        except httpx.HTTPError as error:
            self.error = error

    def _read(self, line: str) -> None:
        if line.startswith(NODE_NOTE):
            self.engines.append(line.removeprefix(NODE_NOTE))
        elif line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            self.error = self.error or event.get("error")
            self.id = event.get("id", self.id)
            for choice in event.get("choices", []):
                self.text += choice["delta"].get("content") or ""


def streams_of(server: ServeRun, subject: str) -> list[Stream]:
    """Start answers that run at both engines, and wait until each has begun."""
    streams = [Stream(server, f"{subject} {i}") for i in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
        poll(lambda: bool(stream.text or stream.error), f"the answer about {subject} has begun", server)  # noqa: B023
    return streams


def test_both_engines_have_an_id_half_of_the_memory_and_a_folder_and_answer(two_engines: ServeRun):
    found = engines_of(two_engines)
    (node_id,) = {engine["node_id"] for engine in found.values()}
    assert set(found) == {f"{node_id}:0", f"{node_id}:1"} and len({one["pid"] for one in found.values()}) == 2
    limits = {one["engine"]["admission"]["limit_bytes"] for one in found.values()}
    total = sum(one["engine"]["admission"]["limit_bytes"] for one in found.values())
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert len(limits) == 1 and total <= 0.81 * machine
    disk = Path(status_of(two_engines)["config"]["engine"]["prefix_cache"]["disk"]["path"])
    assert [one.name for one in disk.iterdir() if one.is_dir()] == ["engine-1"]
    streams = streams_of(two_engines, "a mill")
    for stream in streams:
        stream.join(WAIT_S)
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert {engine for stream in streams for engine in stream.engines} == set(found)


def test_second_turns_of_conversations_go_to_the_engines_that_have_the_first(two_engines: ServeRun):
    questions = [f"Question {i}: " + "What is the weather on the river? " * 12 for i in range(NUM_STREAMS)]
    first = [[{"role": "user", "content": question}] for question in questions]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:  # at once, so that one engine is not enough
        answers = list(pool.map(lambda messages: ask(two_engines, messages, 60), first))
    engines = [timeline_of(two_engines, answer.json()["id"])["engine_id"] for answer in answers]
    assert set(engines) == set(engines_of(two_engines))
    for messages, answer, engine in zip(first, answers, engines, strict=True):
        said = answer.json()["choices"][0]["message"]["content"] or ""
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        second = ask(two_engines, [*messages, *more])
        timeline = timeline_of(two_engines, second.json()["id"])
        assert (timeline["engine_id"], timeline["node_id"]) == (engine, engine.partition(":")[0])
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 80


def test_cache_and_metrics_name_both_engines(two_engines: ServeRun):
    cache = httpx.get(f"{two_engines.base_url}/v1/cache", timeout=30).json()
    assert {one["engine_id"] for one in cache["engines"]} == set(engines_of(two_engines)) and cache["missing"] == []
    lines = httpx.get(f"{two_engines.base_url}/metrics", timeout=30).text.splitlines()
    for name in ("vllm:num_requests_running", "orchard:engine_ready"):
        found = [line for line in lines if line.startswith(f"{name}{{")]
        assert len(found) == 2
        assert 'engine="0"' in found[0] and 'engine="1"' in found[1]


def test_an_engine_is_drained_alone_and_its_node_is_not(two_engines: ServeRun):
    ids = set(engines_of(two_engines))
    node_id = min(ids).partition(":")[0]
    refused = httpx.post(f"{two_engines.base_url}/v1/nodes/{node_id}/drain", json={}, timeout=WAIT_S)
    assert refused.status_code == 503 and "only node" in refused.text
    streams = streams_of(two_engines, "a baker")
    (first,) = streams[-1].engines  # its answer has just begun
    (second,) = ids - {first}
    there = [stream for stream in streams if stream.engines == [first]]
    drained = httpx.post(f"{two_engines.base_url}/v1/nodes/{first}/drain", json={}, timeout=WAIT_S)
    assert drained.status_code == 200, drained.text
    last = httpx.post(f"{two_engines.base_url}/v1/nodes/{second}/drain", json={}, timeout=WAIT_S)
    assert last.status_code == 503 and "all other engines are drained already" in last.text
    for stream in streams:
        stream.join(WAIT_S)
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert [second] in [moves_of(two_engines, stream) for stream in there]
    later = Stream(two_engines, "a bridge")
    later.start()
    later.join(WAIT_S)
    assert later.engines == [second] and later.error is None
    undone = httpx.delete(f"{two_engines.base_url}/v1/nodes/{first}/drain", timeout=WAIT_S)
    assert undone.status_code == 200, undone.text


def test_streams_of_a_killed_engine_go_on_at_the_other_and_it_comes_back_with_its_id(two_engines: ServeRun):
    before = engines_of(two_engines)
    streams = streams_of(two_engines, "a bird")
    killed = streams[0].engines[0]
    os.kill(before[killed]["pid"], signal.SIGKILL)
    for stream in streams:
        stream.join(WAIT_S)
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    (other,) = set(before) - {killed}
    assert [other] in [moves_of(two_engines, stream) for stream in streams if stream.engines == [killed]]
    again = Stream(two_engines, "a bird 0")
    poll(
        lambda: engines_of(two_engines).get(killed, before[killed])["pid"] != before[killed]["pid"],
        f"{killed} is back in another process",
        two_engines,
    )
    again.start()
    again.join(WAIT_S)
    assert again.text == streams[0].text
