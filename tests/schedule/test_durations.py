"""Recorded seconds: every run leaves them, groups are ordered by them, and a command commits them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedule import durations
from tests.schedule.durations import UNKNOWN_S, CpuMeter, Recorder, longest_first, main, refreshed


def item(node_id: str) -> Any:
    return SimpleNamespace(nodeid=node_id)


def report(node_id: str, when: Any, seconds: float, **properties: float) -> pytest.TestReport:
    own = list(properties.items())
    return pytest.TestReport(node_id, ("", None, ""), {}, "passed", None, when, duration=seconds, user_properties=own)


def test_recorder_adds_up_the_phases_of_a_test_and_writes_the_longest_first(tmp_path: Path):
    recorder = Recorder(tmp_path / "last.json")
    recorder.pytest_runtest_logreport(report("a.py::test_b", "call", 0.5))
    recorder.pytest_runtest_logreport(report("a.py::test_a", "setup", 2.0, cpu_s=1.5))
    recorder.pytest_runtest_logreport(report("a.py::test_a", "call", 1.0, cpu_s=0.25))
    recorder.pytest_sessionfinish()
    run = json.loads((tmp_path / "last.json").read_text())
    assert list(run["seconds"].items()) == [("a.py::test_a", 3.0), ("a.py::test_b", 0.5)]
    assert run["outcomes"] == {"passed": 2}
    assert run["cpu"] == {"a.py::test_a": 1.75, "a.py::test_b": 0.0}


def test_cpu_of_a_phase_and_of_its_children_is_in_its_report():
    meter, busy = CpuMeter(), "import time\nwhile time.process_time() < 0.5: pass"

    def used(work: Callable[[], Any]) -> float:
        work()
        hook = meter.pytest_runtest_makereport()
        next(hook)
        with pytest.raises(StopIteration) as made:
            hook.send(report("a.py::test_a", "call", 0.0))
        return dict(made.value.value.user_properties)["cpu_s"]

    assert used(lambda: subprocess.run([sys.executable, "-c", busy], check=True)) > 0.4
    assert used(lambda: None) < 0.4


def test_run_without_tests_does_not_overwrite_the_last_one(tmp_path: Path):
    Recorder(tmp_path / "last.json").pytest_sessionfinish()
    assert not (tmp_path / "last.json").exists()


def test_groups_with_more_seconds_come_first_and_keep_the_order_of_their_tests():
    items = [item(f"{name}.py::test_{i}") for name in ("short", "long", "new") for i in (2, 1)]
    seconds = {"short.py": 1.0, "long.py": UNKNOWN_S + 1}
    ordered = [one.nodeid for one in longest_first(items, seconds)]
    assert ordered == [f"{name}.py::test_{i}" for name in ("long", "new", "short") for i in (2, 1)]


def test_refresh_replaces_the_groups_of_the_run_and_forgets_files_that_are_gone():
    here = Path(__file__).relative_to(durations.ROOT).as_posix()
    old = {here: 9.0, "tests/gone/test_gone.py": 5.0, "servers": 100.0}
    run = {f"{here}::test_a": 1.0, f"{here}::test_b": 2.0}
    assert refreshed(old, run) == {here: 3.0, "servers": 100.0}


def test_command_writes_the_seconds_of_a_run_by_group(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(durations, "COMMITTED", tmp_path / "durations.json")
    (tmp_path / "run.json").write_text(json.dumps({"seconds": {"tests/e2e/test_start.py::test_a": 40.0}}))
    main([str(tmp_path / "run.json")])
    assert json.loads((tmp_path / "durations.json").read_text()) == {"servers": 40.0}
    assert "1 tests, 40 s" in capsys.readouterr().out


def test_committed_seconds_name_groups_that_exist():
    groups = json.loads(durations.COMMITTED.read_text())
    assert not [group for group in groups if group.endswith(".py") and not (durations.ROOT / group).exists()]


def test_tests_with_servers_come_by_the_server_that_they_need():
    files = ("cluster/test_partition.py", "e2e/test_stopping.py", "e2e/test_start.py")
    ordered = [one.nodeid for one in longest_first([item(f"tests/{file}::test_a") for file in files], {})]
    assert ordered == [f"tests/{file}::test_a" for file in reversed(files)]
