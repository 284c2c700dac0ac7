"""`orchard join --stay`: how the command ends, with real processes in the place of Ray's."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cluster.folder import ClusterFolder
from deployments.cluster.membership import forget_membership, write_membership

TIMEOUT_S = 60.0
STAY = """
import sys
from pathlib import Path
from deployments.cluster.folder import ClusterFolder
from deployments.commands.staying import stay
print("waits", flush=True)
sys.exit(stay(ClusterFolder(Path(sys.argv[1])), lambda: print("leaves"), poll_s=0.05))
"""


@pytest.fixture
def member(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a member that has joined."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = ClusterFolder(tmp_path)
    folder.make()
    write_membership(folder, process.pid, "studio.local", "http://127.0.0.1:8000")
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def staying(member: "subprocess.Popen[bytes]", tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", STAY, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_makes_the_machine_leave(staying: "subprocess.Popen[str]", number: signal.Signals):
    with pytest.raises(subprocess.TimeoutExpired):
        staying.wait(0.3)
    staying.send_signal(number)
    shown, _ = staying.communicate(timeout=TIMEOUT_S)
    assert (staying.returncode, shown) == (0, "leaves\n")


def test_it_ends_well_once_the_machine_has_left(staying: "subprocess.Popen[str]", tmp_path: Path):
    forget_membership(ClusterFolder(tmp_path))
    shown, noted = staying.communicate(timeout=TIMEOUT_S)
    assert (staying.returncode, shown) == (0, "") and "has left the cluster" in noted


def test_it_fails_when_the_members_processes_have_ended(
    staying: "subprocess.Popen[str]", member: "subprocess.Popen[bytes]"
):
    member.kill()
    shown, noted = staying.communicate(timeout=TIMEOUT_S)
    assert (staying.returncode, shown) == (1, "") and "processes have ended" in noted
