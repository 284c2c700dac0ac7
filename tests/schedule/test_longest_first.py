"""A test in which its process ends fails once, and what was to run after it runs elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.night("it tests how tests are distributed, not the server")

CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.schedule.longest_first import LongestFirstScheduling

    return LongestFirstScheduling(config, log)
"""

TESTS = """
import os
import time

import pytest


@pytest.mark.parametrize("i", range(8))
def test_one(i):
    if i == 2:
        os._exit(1)
    time.sleep(1000 if i == 5 else 0)
"""


def test_a_process_that_ends_or_hangs_costs_one_test_each(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_probe.py").write_text(TESTS)
    timeout = ["-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=1"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *timeout, "--rootdir", str(tmp_path), str(tmp_path)]
    repository = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    failed = [line.split(" - ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == ["FAILED test_probe.py::test_one[2]", "FAILED test_probe.py::test_one[5]"], run.stdout + run.stderr
    assert "2 failed, 6 passed" in run.stdout
