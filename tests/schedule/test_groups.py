"""The groups of tests: the table of files with servers of their own is complete."""

import re
from pathlib import Path

from tests.schedule.groups import (
    BROWSER,
    CLUSTER,
    LONG_FILES,
    ONE_SERVER,
    OWN_SERVER,
    OWN_SERVERS,
    SERVERS,
    group_of,
    place_of,
)

TESTS = Path(__file__).parents[1]


def test_files_that_start_a_server_or_use_the_small_one_are_in_the_group_of_own_servers():
    paths = [*(TESTS / "e2e").rglob("test_*.py")]
    own = [path.name for path in paths if re.search(r"(?<!\.)\b(serve_run|small_server)\b(?!\.)", path.read_text())]
    assert sorted(own) == sorted(OWN_SERVERS)


def test_each_file_is_a_group_and_those_with_servers_share_one():
    places = {
        "cluster/test_topology.py": CLUSTER,
        "e2e/clients/test_retries.py": OWN_SERVER,
        "e2e/test_start.py": ONE_SERVER,
    }
    for name, place in places.items():
        assert place_of(f"tests/{name}") == place
        assert group_of(f"tests/{name}::test_a[x::y]") == SERVERS
    assert group_of("tests/browser/test_chat.py::test_a") == group_of("tests/browser/test_server.py::test_b") == BROWSER
    assert group_of("tests/engine/test_config.py::test_a[tests/e2e]") == "tests/engine/test_config.py"


def test_each_test_of_a_long_file_is_a_group():
    for file in LONG_FILES:
        assert (TESTS.parent / file).is_file()
        assert group_of(f"{file}::test_a[x::y]") == f"{file}::test_a[x::y]"
