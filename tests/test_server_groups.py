"""The table of files with servers of their own is complete."""

import re
from pathlib import Path

from tests.server_groups import OWN_SERVERS, group_of

TESTS = Path(__file__).parent


def test_files_that_start_a_server_or_use_the_small_one_are_in_the_group_of_own_servers():
    paths = [*(TESTS / "e2e").rglob("test_*.py")]
    own = [path.name for path in paths if re.search(r"\b(serve_run|small_server)\b", path.read_text())]
    assert sorted(own) == sorted(OWN_SERVERS)


def test_each_folder_of_tests_with_servers_has_its_group():
    assert group_of("tests/cluster/test_topology.py::test_a[x::y]") == "cluster"
    assert group_of("tests/e2e/clients/test_retries.py::test_a") == "own servers"
    assert group_of("tests/e2e/clients/test_agent.py::test_a") == "one server"
