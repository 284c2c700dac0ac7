"""Two nodes with addresses of their own, asked over HTTP at either one; then the cable of one is pulled.

A node that is killed resets its connections. One that is cut off does not: whoever waits for it must notice by itself.
"""

import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.namespaces import Machine, machines, why_there_are_none
from tests.e2e.pictures import about, image_part, shape

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent.parent
PORT = 8123
START_TIMEOUT_S = 300.0
STARTS = 3
ANSWER_TIMEOUT_S = 120.0
NOTICED_S = 20.0
"""How long an engine may be silent before its streams end: engine_stream.SILENCE_LIMIT_S."""
MARGIN_S = 15.0
"""For a machine that has other things to do."""
RESOURCES = json.dumps({"mlx": 1})
NODE_COMMENT = ": X-Orchard-Node: "

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
LONG: dict[str, Any] = {"max_tokens": 400, "min_tokens": 400}

OWN_KEY, FEW_ROWS_KEY, SELDOM_KEY = "key-of-the-operator", "key-with-few-rows", "key-of-two-a-minute"
KEYS = {
    OWN_KEY: {"name": "operator", "is_administrative": True},
    FEW_ROWS_KEY: {"name": "few rows", "max_rows": 2},
    SELDOM_KEY: {"name": "seldom", "max_requests_per_minute": 2},
}


@dataclass
class Answer:
    """An answer over HTTP. seconds: from the request to the end."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    id: str = ""
    error: dict[str, Any] | None = None
    seconds: float = 0.0
    ended_at: float = 0.0
    num_events: int = 0
    node_id: str = ""
    num_cached: int = 0


@dataclass
class Node:
    machine: Machine
    node_id: str = ""
    asked: list[Answer] = field(default_factory=list)
    port: int = PORT

    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {OWN_KEY}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_TIMEOUT_S, headers=headers)

    def ask(
        self, messages: list[dict[str, Any]], request_id: str = "", key: str = OWN_KEY, **fields: Any
    ) -> "Future[Answer]":
        """Over HTTP, at the proxy of this node."""
        answer = Answer()
        self.asked.append(answer)
        body = {"model": "demo", "messages": messages, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {key}", **({"X-Request-Id": request_id} if request_id else {})}
        return self.machine.submit(self._talk, body, headers, answer)

    def _talk(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> Answer:
        began = time.monotonic()
        path = "/v1/chat/completions"
        with self._http() as http, http.stream("POST", path, json=body, headers=headers) as response:
            answer.status = response.status_code
            answer.node_id = response.headers.get("x-orchard-node", "")
            if body.get("stream") and answer.status == 200:
                for line in response.iter_lines():
                    self._add(answer, line)
            else:
                whole = json.loads(response.read())
                answer.error = whole.get("error")
                if answer.error is None:
                    (choice,) = whole["choices"]
                    answer.text, answer.finish_reason = choice["message"]["content"], choice["finish_reason"]
                    answer.num_cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        answer.ended_at = time.monotonic()
        answer.seconds = answer.ended_at - began
        return answer

    def _add(self, answer: Answer, line: str) -> None:
        if line.startswith(NODE_COMMENT):  # of a stream that was open before its node was known
            answer.node_id = line.removeprefix(NODE_COMMENT)
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        answer.num_events += 1
        event = json.loads(line.removeprefix("data: "))
        answer.error = event.get("error", answer.error)
        answer.id = event.get("id", answer.id)
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str) -> Any:
        return self._call("POST", path)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def _call(self, method: str, path: str) -> Any:
        def call() -> Any:
            with self._http() as http:
                return http.request(method, path, json={} if method == "POST" else None).json()

        return self.machine.submit(call).result(timeout=ANSWER_TIMEOUT_S)


class TwoNodes:
    """A head and a second node. The second one is `far`."""

    def __init__(self, made: list[Machine], directory: Path):
        self.near, self.far = (Node(machine) for machine in made)
        self._undisturbed: dict[int, Answer] = {}
        self._directory = directory
        token = {"RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", secrets.token_hex(32))}
        self._env = {**os.environ, **token, "RAY_TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
        self._env["RAY_raylet_start_wait_time_s"] = "120"
        for name in ("RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"):
            self._env.pop(name, None)

    def start(self) -> None:
        head = f"{self.near.machine.address}:6379"
        self._ray(self.near.machine, "--head", "--port=6379", "--include-dashboard=false")
        self._ray(self.far.machine, f"--address={head}")
        log = self._directory / "app.log"
        # As `serve run` does that joins a cluster
        env = {**self._env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        keys = self._directory / "keys.json"
        keys.touch(0o600)
        hashes = {key: f"sha256:{sha256(key.encode()).hexdigest()}" for key in KEYS}
        keys.write_text(json.dumps([{"hash": hashes[key], **entry} for key, entry in KEYS.items()]))
        command = [sys.executable, "-m", "tests.cluster.namespace_app", head, "2", str(PORT), str(keys)]
        app = self.near.machine.start(command, env, log)
        wait_until(
            lambda: app.poll() is not None or "Orchard runs" in log.read_text(),
            START_TIMEOUT_S,
            lambda: log.read_text()[-4000:],
        )
        assert app.poll() is None, log.read_text()[-4000:]
        for node in (self.near, self.far):
            node.node_id = node.get("/v1/status")["ingress"][0]["node_id"]

    def undisturbed(self, numbers: Iterable[int]) -> list[Answer]:
        """Return what requests of `counting` get that nothing disturbs; each is asked once."""
        new = [number for number in numbers if number not in self._undisturbed]
        asked = [self.near.ask(counting(number), stream=True, **LONG) for number in new]
        for number, future in zip(new, asked, strict=True):
            self._undisturbed[number] = future.result(timeout=ANSWER_TIMEOUT_S)
        return [self._undisturbed[number] for number in numbers]

    def _ray(self, machine: Machine, *options: str) -> None:
        """Returns when the node runs. On a busy machine Ray gives up at times, and is started again."""
        log = self._directory / f"{machine.name}.log"
        ray = str(Path(sys.executable).parent / "ray")
        common = [f"--node-ip-address={machine.address}", "--num-cpus=2", f"--resources={RESOURCES}"]
        command = [ray, "start", *options, *common, "--object-store-memory=104857600", "--block"]
        for attempt in range(STARTS):
            started = machine.start(command, self._env, log)
            wait_until(
                lambda process=started: process.poll() is not None or "Ray runtime started" in log.read_text(),
                START_TIMEOUT_S,
                lambda: log.read_text()[-4000:],
            )
            if started.poll() is None:
                return
            assert attempt < STARTS - 1, log.read_text()[-4000:]
            machine.end_processes()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    reason = why_there_are_none()
    if reason is not None:
        if os.environ.get("ORCHARD_NAMESPACES") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps a note there, whatever the temp_dir, and does not make it
    directory = Path(tempfile.mkdtemp(prefix="orn-", dir="/tmp"))
    try:
        with machines(2) as made:
            two = TwoNodes(made, directory)
            two.start()
            yield two
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def engine_of(status: dict[str, Any], node: Node) -> dict[str, Any]:
    (found,) = [replica for replica in status["engines"] if replica["node_id"] == node.node_id]
    return found["engine"]


def test_each_deployment_has_one_replica_on_each_node_and_no_planner_loads_mlx(nodes: TwoNodes):
    for asked in (nodes.near, nodes.far):
        status = asked.get("/v1/status")
        for deployment in ("ingress", "engines", "text", "mllm"):
            found = [replica["node_id"] for replica in status[deployment]]
            assert sorted(found) == sorted(node.node_id for node in (nodes.near, nodes.far)), deployment
        assert not any(replica["has_mlx"] for name in ("ingress", "text", "mllm") for replica in status[name])


def test_both_nodes_give_the_same_answers_over_http(nodes: TwoNodes):
    picture = about("What is in the image?", image_part(shape("red", "circle")))
    for messages in (QUESTION, picture):
        answers: list[Answer] = []
        while len({answer.node_id for answer in answers}) < 2:
            assert len(answers) < 64, "one node gets all of them"
            asked = [
                node.ask(messages, stream=stream, prompt_cache_key=f"session {len(answers)} {i}")
                for node in (nodes.near, nodes.far)
                for stream in (False, True)
                for i in range(3)
            ]
            answers += [future.result(timeout=ANSWER_TIMEOUT_S) for future in asked]
        assert {answer.status for answer in answers} == {200}, [answer.error for answer in answers]
        assert len({(answer.text, answer.finish_reason) for answer in answers}) == 1 and answers[0].text


@pytest.mark.parametrize("is_chosen", [True, False], ids=["by the client's id", "by the answer's id"])
def test_a_request_at_one_node_is_cancelled_at_the_other(nodes: TwoNodes, is_chosen: bool):
    future = nodes.near.ask(QUESTION, "to-cancel", stream=True, **LONG)
    wait_until(lambda: nodes.near.asked[-1].num_events > 2, ANSWER_TIMEOUT_S)
    id = "to-cancel" if is_chosen else nodes.near.asked[-1].id
    assert nodes.far.post(f"/v1/chat/completions/{id}/cancel")["cancelled"] is True
    answer = future.result(timeout=ANSWER_TIMEOUT_S)
    assert answer.error is not None and answer.error["code"] == "request_cancelled"
    assert nodes.near.post(f"/v1/chat/completions/{id}/cancel")["error"]["code"] == "request_not_found"


def test_limits_of_a_key_hold_at_both_nodes_together(nodes: TwoNodes):
    both = nodes.near, nodes.far
    running = [node.ask(QUESTION, key=FEW_ROWS_KEY, stream=True, **LONG) for node in both]
    wait_until(lambda: all(node.asked[-1].num_events > 2 for node in both), ANSWER_TIMEOUT_S)
    refused = [node.ask(QUESTION, key=FEW_ROWS_KEY) for node in both]
    asked = [both[i % 2].ask(QUESTION, key=SELDOM_KEY) for i in range(8)]
    for limit, futures in (("max_rows", refused), ("max_requests_per_minute", asked)):
        answers = [future.result(timeout=ANSWER_TIMEOUT_S) for future in futures]
        assert all(limit in answer.error["message"] for answer in answers if answer.error), limit
        assert [answer.status for answer in answers].count(429) >= {"max_rows": 2, "max_requests_per_minute": 5}[limit]
    assert [future.result(timeout=ANSWER_TIMEOUT_S).status for future in running] == [200, 200]


def test_turns_of_a_conversation_stay_where_its_prefix_is_cached_whichever_node_is_asked(nodes: TwoNodes):
    def talk(number: int) -> list[Answer]:
        """Ask both nodes in turn, so that half of the turns are asked where the conversation does not live."""
        messages = [{"role": "system", "content": "Answer in one sentence. " * 10}]
        answers: list[Answer] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"What is {number} + {turn}?"})
            asked = (nodes.near, nodes.far)[(number + turn) % 2]
            answers.append(asked.ask(messages, max_tokens=8).result(timeout=ANSWER_TIMEOUT_S))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    with ThreadPoolExecutor(4) as threads:
        talks = list(threads.map(talk, range(12)))
    assert {answer.status for answers in talks for answer in answers} == {200}
    turns = [turn for answers in talks for turn in itertools.pairwise(answers)]
    stayed = [after for before, after in turns if before.node_id == after.node_id]
    assert len(stayed) >= 0.8 * len(turns), "a node that does not answer in time is not waited for"
    assert all(answer.num_cached > 60 for answer in stayed), "more than the system part, from the turn before"


def running_streams(nodes: TwoNodes) -> list["Future[Answer]"]:
    """Start streams, and return when the far node answers the first ones: the near one takes none until they run."""
    path = f"/v1/nodes/{nodes.near.node_id}/drain"
    assert nodes.near.post(path)["draining"] is True
    streams = [nodes.near.ask(counting(i), stream=True, **LONG) for i in range(4)]
    running = nodes.near.asked[-4:]
    wait_until(lambda: all(answer.num_events > 2 for answer in running), ANSWER_TIMEOUT_S)
    assert nodes.near.delete(path)["draining"] is False
    assert {answer.node_id for answer in running} == {nodes.far.node_id}
    return streams + [nodes.near.ask(counting(i), stream=True, **LONG) for i in range(4, 8)]


def counting(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}: {QUESTION[0]['content']}"}]


def check_whole(nodes: TwoNodes, streams: list["Future[Answer]"]) -> None:
    """Check that no stream has noticed anything: each is what an undisturbed request gets."""
    answers = [future.result(timeout=ANSWER_TIMEOUT_S) for future in streams]
    assert [answer.error for answer in answers] == [None] * len(answers)
    undisturbed = nodes.undisturbed(range(len(streams)))
    assert [(one.text, one.finish_reason) for one in answers] == [(one.text, "length") for one in undisturbed]


def test_drained_node_gives_its_answers_away_and_takes_none_until_it_is_back(nodes: TwoNodes):
    streams = running_streams(nodes)
    path = f"/v1/nodes/{nodes.far.node_id}/drain"
    assert nodes.near.post(path)["draining"] is True
    engine = engine_of(nodes.near.get("/v1/status"), nodes.far)
    assert engine["num_running"] == engine["num_waiting"] == 0 and engine["num_moved"] > 0
    during = [node.ask([{"role": "user", "content": f"{i}?"}]) for i in range(6) for node in (nodes.near, nodes.far)]
    said = [future.result(timeout=ANSWER_TIMEOUT_S) for future in during]
    check_whole(nodes, streams)
    assert {(answer.status, answer.node_id) for answer in said} == {(200, nodes.near.node_id)}
    assert nodes.near.delete(path)["draining"] is False
    after = [nodes.near.ask(counting(i), stream=True, **LONG) for i in range(20, 32)]  # too many for one node
    assert nodes.far.node_id in {future.result(timeout=ANSWER_TIMEOUT_S).node_id for future in after}
    assert nodes.near.post("/v1/nodes/0123/drain")["error"]["code"] == "node_not_found"


def test_streams_of_a_killed_engine_go_on_at_the_other_node(nodes: TwoNodes):
    streams = running_streams(nodes)
    (found,) = [one for one in nodes.near.get("/v1/status")["engines"] if one["node_id"] == nodes.far.node_id]
    os.kill(found["pid"], signal.SIGKILL)
    during = [nodes.near.ask(QUESTION) for _ in range(8)]
    check_whole(nodes, streams)
    said = [future.result(timeout=ANSWER_TIMEOUT_S) for future in during]
    assert {answer.status for answer in said} == {200}, [answer.error for answer in said]

    def is_back() -> bool:
        engines = nodes.near.get("/v1/status")["engines"]
        return any(one["node_id"] == nodes.far.node_id and one["pid"] != found["pid"] for one in engines)

    wait_until(is_back, START_TIMEOUT_S)


def test_streams_of_a_cut_off_node_go_on_at_the_other_node_which_keeps_answering(nodes: TwoNodes):
    """Last of all: the node does not come back."""
    streams = running_streams(nodes)
    pulled_at = time.monotonic()
    nodes.far.machine.pull_the_cable()
    during = []
    while time.monotonic() - pulled_at < NOTICED_S:
        during.append(nodes.near.ask(QUESTION))
        time.sleep(2)
    said = [future.result(timeout=ANSWER_TIMEOUT_S) for future in during]
    check_whole(nodes, streams)
    print("new requests took", sorted(round(answer.seconds, 1) for answer in said))  # noqa: T201
    assert {(answer.status, answer.text) for answer in said} == {(200, said[0].text)}, [a.error for a in said]
    assert max(answer.seconds for answer in said) < NOTICED_S + MARGIN_S

    def is_at_rest() -> bool:
        status = nodes.near.get("/v1/status")
        own = [one for one in status["ingress"] if one["node_id"] == nodes.near.node_id]
        return [one["num_in_flight"] for one in own] == [0]

    wait_until(is_at_rest, 30)
    assert nodes.near.ask(QUESTION).result(timeout=ANSWER_TIMEOUT_S).text == said[0].text
