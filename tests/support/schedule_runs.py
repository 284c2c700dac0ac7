"""Runs many random schedules: the same ones in CI, ORCHARD_SCHEDULES new ones on request."""

import os
import zlib
from collections import Counter
from typing import Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.schedules import Schedule, schedules

NUM_SCHEDULES = int(os.environ.get("ORCHARD_SCHEDULES", "0"))


class Checker(Protocol):
    @property
    def figures(self) -> Counter[str]: ...

    def check(self, schedule: Schedule) -> None: ...


def check_many(bench: Checker, name: str, num_schedules: int, max_requests: int = 6) -> None:
    """In CI different ones for each name."""

    @settings(
        max_examples=num_schedules,
        deadline=None,
        database=None,
        derandomize=not NUM_SCHEDULES,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(schedules(max(30, num_schedules // 2), max_requests))
    def check(schedule: Schedule) -> None:
        bench.check(schedule)

    (check if NUM_SCHEDULES else seed(zlib.crc32(name.encode()))(check))()
    print(f"\n{name}: {', '.join(f'{what} {count}' for what, count in sorted(bench.figures.items()))}")  # noqa: T201
