"""The groups of tests: the table of files with servers of their own is complete."""

import re
from pathlib import Path

from tests.schedule.groups import CLUSTER, ONE_SERVER, OWN_SERVER, OWN_SERVERS, group_of

TESTS = Path(__file__).parents[1]


def test_files_that_start_a_server_or_use_the_small_one_are_in_the_group_of_own_servers():
    paths = [*(TESTS / "e2e").rglob("test_*.py")]
    own = [path.name for path in paths if re.search(r"\b(serve_run|small_server)\b", path.read_text())]
    assert sorted(own) == sorted(OWN_SERVERS)


def test_each_file_is_a_group_and_those_with_servers_share_one():
    assert group_of("tests/cluster/test_topology.py::test_a[x::y]") == CLUSTER
    assert group_of("tests/e2e/clients/test_retries.py::test_a") == OWN_SERVER
    assert group_of("tests/e2e/clients/test_agent.py::test_a") == ONE_SERVER
    assert group_of("tests/engine/test_config.py::test_a[tests/e2e]") == "tests/engine/test_config.py"
