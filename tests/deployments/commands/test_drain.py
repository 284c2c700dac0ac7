"""Which node or engine `orchard drain` means by an id; the drain itself is in tests/e2e/ and tests/cluster/."""

from dataclasses import asdict
from typing import Any

import pytest

from deployments.commands import connection
from engine.placement import TakenOver
from tests.deployments.commands.conftest import Orchard

ENGINES = [("aaaa11", "aaaa11:0"), ("aaaa11", "aaaa11:1"), ("aaaa22", "aaaa22"), ("bbbb33", "bbbb33")]


class Server:
    """A server with these engines, which notes what is drained and undone."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"engines": [{"node_id": node_id, "engine_id": engine_id} for node_id, engine_id in ENGINES]}

    def post(self, path: str, body: Any) -> dict[str, Any]:
        self.asked.append(path.split("/")[3])
        return {"snapshots": asdict(TakenOver())}

    def delete(self, path: str) -> None:
        self.asked.append(path.split("/")[3])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(connection, "connection_of", lambda *_: found)
    return found


@pytest.mark.parametrize(
    "named, drained, said",
    [
        ("aaaa11", "aaaa11", "Node aaaa11 "),
        ("aaaa1", "aaaa11", "Node aaaa11 "),
        ("aaaa11:1", "aaaa11:1", "Engine aaaa11:1 "),
        ("aaaa1:0", "aaaa11:0", "Engine aaaa11:0 "),
        ("bbbb", "bbbb33", "Node bbbb33 "),
    ],
)
def test_a_node_or_one_of_its_engines_is_named_as_the_list_of_nodes_shows_it(
    orchard: Orchard, server: Server, named: str, drained: str, said: str
):
    status, _, noted = orchard("drain", named)
    assert (status, server.asked) == (0, [drained]) and f"{said}is drained" in noted
    status, _, noted = orchard("drain", "--undo", named)
    assert (status, server.asked[1:]) == (0, [drained]) and f"{said}takes requests again" in noted


@pytest.mark.parametrize("named, num_found", [("aaaa", 2), ("aaaa11:2", 0), ("aaaa22:0", 0), ("cccc", 0)])
def test_an_id_that_names_none_or_several_is_refused_with_all_ids(
    orchard: Orchard, server: Server, named: str, num_found: int
):
    status, _, noted = orchard("drain", named)
    assert status == 1 and f"{num_found} nodes have an id that begins with '{named}'" in noted
    assert "aaaa11, aaaa11:0, aaaa11:1, aaaa22, bbbb33" in noted and not server.asked
