"""Which tests run in one process, one after the other: those of a file, and those that share a server or a cluster.

Tests of a file that share nothing may run in several processes.

The marks `xdist_group` of `--dist loadgroup` have no effect with pytest 9.2, whose items have no `_nodeid`.
"""

from functools import cache
from pathlib import PurePosixPath

OWN_SERVERS = (
    "test_bad_config.py",
    "test_engine_death.py",
    "test_logs.py",
    "test_retries.py",
    "test_spec_prefill.py",
    "test_starting.py",
    "test_stopping.py",
    "test_storm.py",
    "test_two_engines.py",
)
"""Files of tests/e2e whose tests do not use the server of all others."""

LONG_FILES = ("tests/engine/worker/test_family_traffic.py", "tests/metal/test_zoo.py")
"""Files of tests that share nothing and together last for many minutes: each test is a group of its own."""

BROWSER = "browser"
"""The group of all tests of the page, which share a browser and a server."""

SERVERS = "servers"
"""The group of all tests with real servers: they start one after the other, as each start takes all cores for a while.
Mostly they wait, so two other processes have enough to do beside them."""
ONE_SERVER, OWN_SERVER, CLUSTER = range(3)
"""The order of the tests in that group: those of the shared server, of others, of a cluster."""


def group_of(node_id: str) -> str:
    """Return the group of a test: the path of its file, SERVERS or BROWSER; the test itself in LONG_FILES."""
    file = node_id.partition("::")[0]
    if file in LONG_FILES:
        return node_id
    if "browser" in PurePosixPath(file).parts:
        return BROWSER
    return file if place_of(file) is None else SERVERS


@cache
def place_of(file: str) -> int | None:
    """Return the place of a file in the group of servers; None for one that needs no server."""
    path = PurePosixPath(file)
    if "cluster" in path.parts and "deployments" not in path.parts:
        return CLUSTER
    if "e2e" in path.parts:
        return OWN_SERVER if path.name in OWN_SERVERS else ONE_SERVER
    return None
