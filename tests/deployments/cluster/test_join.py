"""The head's endpoint and its client, over loopback."""

import http.client
import json
from collections.abc import Iterator

import pytest

from deployments.cluster import proof_server
from deployments.cluster.facts import read_facts
from deployments.cluster.join_client import HeadClient, HeadRefused
from deployments.cluster.join_server import FACTS_PATH, JoinServer
from deployments.cluster.proof import NONCE, PROOF, proof_of_member

TOKEN = "the token of the cluster"
HOST = "127.0.0.1"
ANSWER = {
    "gcs": "192.168.1.10:6379",
    "url": "http://127.0.0.1:8000",
    "resources": {"mlx": 1.0},
    "engines_per_node": "all",
    "device": "auto",
    "term": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[JoinServer]:
    facts = read_facts([("demo", None)]).as_json()
    made = JoinServer(HOST, 0, TOKEN, lambda: {"facts": facts, **ANSWER})
    made.start()
    yield made
    made.stop()


def get(server: JoinServer, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=10)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_machine_with_the_token_gets_the_facts_and_measures_the_way(server: JoinServer):
    client = HeadClient(f"{HOST}:{server.port}", TOKEN)
    answer = client.facts()
    assert answer.facts.checkpoints[0].model == "demo"
    assert (answer.gcs, answer.url, answer.resources) == (ANSWER["gcs"], ANSWER["url"], ANSWER["resources"])
    assert answer.seen_address == answer.own_address == HOST
    assert client.bytes_per_s() > 0


def test_another_token_is_refused(server: JoinServer):
    with pytest.raises(HeadRefused, match=r"answered 403: .*the token is not that of this cluster"):
        HeadClient(f"{HOST}:{server.port}", "another token").facts()


def test_a_head_without_the_token_is_refused():
    facts = read_facts([]).as_json()
    impostor = JoinServer(HOST, 0, "its own token", lambda: {"facts": facts, **ANSWER})
    impostor.start()
    try:
        client = HeadClient(f"{HOST}:{impostor.port}", "its own token")
        client._client._token = TOKEN
        with pytest.raises(HeadRefused):
            client.facts()
    finally:
        impostor.stop()


def test_a_question_is_answered_once_and_never_without_a_proof(server: JoinServer):
    nonce = json.loads(get(server, "/challenge")[1])["nonce"]
    headers = {NONCE: nonce, PROOF: proof_of_member(TOKEN, nonce, FACTS_PATH)}
    assert get(server, FACTS_PATH, headers)[0] == 200
    assert get(server, FACTS_PATH, headers)[0] == 403, "the nonce has been used"
    assert get(server, FACTS_PATH)[0] == 403
    made_up = {NONCE: "0" * 32, PROOF: proof_of_member(TOKEN, "0" * 32, FACTS_PATH)}
    assert get(server, FACTS_PATH, made_up)[0] == 403


def test_the_proof_for_one_path_opens_no_other(server: JoinServer):
    nonce = json.loads(get(server, "/challenge")[1])["nonce"]
    assert get(server, "/transfer", {NONCE: nonce, PROOF: proof_of_member(TOKEN, nonce, FACTS_PATH)})[0] == 403


def test_open_questions_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof_server, "MAX_NONCES", 3)
    bounded = JoinServer(HOST, 0, TOKEN, lambda: {})
    bounded.start()
    try:
        assert [get(bounded, "/challenge")[0] for _ in range(5)] == [200, 200, 200, 503, 503]
    finally:
        bounded.stop()


def test_no_head_and_no_address_are_named():
    with pytest.raises(HeadRefused, match=r"no head answers at 127.0.0.1:1 \(Connection refused\).*serve --cluster"):
        HeadClient("127.0.0.1:1", TOKEN).facts()
    for head in ("", ":6378", "host:port"):
        with pytest.raises(HeadRefused, match=f"the head is '{head}'"):
            HeadClient(head, TOKEN)
