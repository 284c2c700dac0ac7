"""The scheduler of `pytest -n`: gives each process one group of tests after the other, in the order of collection.

tests/conftest.py puts the groups with the most recorded seconds first, so the last ones are short and the processes end
at nearly the same time.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.schedule.groups import group_of


class LongestFirstScheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any):
        config.option.loadscopereorder = False  # by number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
