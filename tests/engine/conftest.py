"""Another process that holds a lock, for the tests of locks."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HOLD = """
import sys
from pathlib import Path
from engine.process_lock import ProcessLock

lock = ProcessLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

Holder = subprocess.Popen[str]


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Holder]]:
    """hold(path): another process that has the lock."""
    holders: list[Holder] = []

    def start(path: Path) -> Holder:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        holders.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.wait(30)
        for pipe in (holder.stdin, holder.stdout):
            assert pipe is not None
            pipe.close()
