"""Which tests with servers run in one process: `pytest -n 2 --dist loadscope` runs two groups side by side.

The marks `xdist_group` of `--dist loadgroup` have no effect with pytest 9.2, whose items have no `_nodeid`.
"""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

OWN_SERVERS = (
    "test_bad_config.py",
    "test_engine_death.py",
    "test_retries.py",
    "test_spec_prefill.py",
    "test_stopping.py",
    "test_storm.py",
)
"""Files whose tests do not use the server of all others."""


def group_of(node_id: str) -> str:
    """Return the group of a test; groups with more tests start first, and the tests of one run in their order."""
    path = PurePosixPath(node_id.partition("::")[0])
    if "cluster" in path.parts:
        return "cluster"
    return "own servers" if path.name in OWN_SERVERS else "one server"


class ServerGroupScheduling(LoadScopeScheduling):
    """Gives each process one group after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
