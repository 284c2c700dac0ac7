"""Seconds of the tests: every run records them, and the scheduler orders groups by those of tests/durations.json.

    uv run python -m tests.schedule.durations

puts the seconds of the last run there. They include fixtures: a server's start counts for the first test that uses it.
"""

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.schedule.groups import LONG_FILES, group_of, place_of

ROOT = Path(__file__).parents[2]
LAST_RUN = ROOT / ".durations.json"
"""Seconds of each test of the last run; not committed."""
COMMITTED = ROOT / "tests" / "durations.json"
CPU_S = "cpu_s"
"""Name of a report's property."""
UNKNOWN_S = 60.0
"""For a group that was never recorded: it starts early, as it may be long."""


class CpuMeter:
    """Plugin of the processes that run tests: adds to each phase's report the seconds of CPU that it took.

    They are those of the process and of its children that have ended, not those of servers, whose parents go on.
    """

    def __init__(self):
        self._before_s = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = sum(os.times()[:4])
        report.user_properties = [*report.user_properties, (CPU_S, now_s - self._before_s)]
        self._before_s = now_s
        return report


class Recorder:
    """Plugin that adds up the seconds of each test's set-up, call and tear-down, and writes them when the run ends."""

    def __init__(self, path: Path = LAST_RUN):
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._cpu: dict[str, float] = defaultdict(float)
        self._outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is not pytest.TestReport:  # a subtest's seconds are part of its test's
            return
        self._seconds[report.nodeid] += report.duration
        self._cpu[report.nodeid] += sum(cast(float, value) for key, value in report.user_properties if key == CPU_S)
        if report.when == "call" or not report.passed:
            self._outcomes[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        if self._seconds:
            run = {"outcomes": dict(self._outcomes), "seconds": longest(self._seconds), "cpu": longest(self._cpu)}
            self._path.write_text(json.dumps(run, indent=0) + "\n")


def longest(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by name, the most first."""
    ordered = sorted(seconds.items(), key=lambda pair: (-pair[1], pair[0]))
    return {name: round(s, 2) for name, s in ordered}


def by_group(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up the seconds of tests by group."""
    groups: dict[str, float] = defaultdict(float)
    for node_id, s in seconds.items():
        groups[group_of(node_id)] += s
    return dict(groups)


def recorded() -> dict[str, float]:
    """Return the committed seconds by group."""
    return json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}


def longest_first(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """Order tests by the seconds of their groups, those of one group as they were collected, servers by their place."""

    def rank(item: pytest.Item) -> tuple[float, str, int]:
        group = group_of(item.nodeid)
        return -seconds.get(group, UNKNOWN_S), group, place_of(item.nodeid.partition("::")[0]) or 0

    return sorted(items, key=rank)


def refreshed(old: Mapping[str, float], run: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by group after a run, which may be of some groups only, without those whose files are gone."""
    groups = {**old, **by_group(run)}
    return {group: s for group, s in groups.items() if _is_there(group)}


def _is_there(group: str) -> bool:
    """Return whether a group still exists; a test of a file is taken to be there as long as the file is."""
    file, _, test = group.partition("::")
    if not file.endswith(".py"):
        return True
    return (ROOT / file).exists() and (bool(test) or file not in LONG_FILES)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=LAST_RUN, help="what a run has recorded")
    run = json.loads(parser.parse_args(arguments).run.read_text())["seconds"]
    groups = refreshed(recorded(), run)
    COMMITTED.write_text(json.dumps(longest(groups), indent=0) + "\n")
    sys.stdout.write(f"{len(run)} tests, {sum(run.values()):.0f} s; {COMMITTED.name}: {sum(groups.values()):.0f} s\n")


if __name__ == "__main__":
    main()
