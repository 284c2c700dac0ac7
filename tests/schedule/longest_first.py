"""The scheduler of `pytest -n`: gives each process one group of tests after the other, in the order of collection.

tests/conftest.py puts the groups with the most recorded seconds first, so the last ones are short and the processes end
at nearly the same time.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.schedule.groups import group_of


class LongestFirstScheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any):
        config.option.loadscopereorder = False  # by number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the tests of a process that ended to the others, without the one in which it ended; return that one.

        LoadScopeScheduling would run that test in one process after the other until none may start anymore.
        """
        crashed = None
        for group, tests in self.assigned_work.pop(node).items():
            if crashed is None:
                crashed = next((test for test, is_done in tests.items() if not is_done), None)
                if crashed is not None:
                    tests[crashed] = True
            if not all(tests.values()):
                self.workqueue[group] = tests
        if crashed is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed
