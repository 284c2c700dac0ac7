"""Which tests run in one process, one after the other: those of a file, and those that share a server or a cluster.

The marks `xdist_group` of `--dist loadgroup` have no effect with pytest 9.2, whose items have no `_nodeid`.
"""

from functools import cache
from pathlib import PurePosixPath

OWN_SERVERS = (
    "test_bad_config.py",
    "test_engine_death.py",
    "test_retries.py",
    "test_spec_prefill.py",
    "test_starting.py",
    "test_stopping.py",
    "test_storm.py",
)
"""Files of tests/e2e whose tests do not use the server of all others."""

ONE_SERVER, OWN_SERVER, CLUSTER = "one server", "own servers", "cluster"


def group_of(node_id: str) -> str:
    """Return the group of a test: the path of its file, or the name of the servers that it shares."""
    return _group_of_file(node_id.partition("::")[0])


@cache
def _group_of_file(name: str) -> str:
    path = PurePosixPath(name)
    if "cluster" in path.parts:
        return CLUSTER
    if "e2e" in path.parts:
        return OWN_SERVER if path.name in OWN_SERVERS else ONE_SERVER
    return name
