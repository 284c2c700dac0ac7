"""Rejoiner: the process that `orchard join` leaves behind, which joins again when Ray has ended on this machine.

Ray ends on a machine that the head has not reached for some seconds, as when a cable was out, and when one of its own
processes dies. Until the machine leaves by `orchard leave`, the rejoiner then gives the command again: the comparison
with the head is made anew, and a machine that differs meanwhile stays outside.

Usage: python -m deployments.cluster.rejoin PID COMMAND ...
"""

import subprocess
import sys
import time
from collections.abc import Sequence

from deployments.cluster.folder import ClusterFolder, FolderError
from deployments.cluster.membership import noted_membership

POLL_S = 2.0
AGAIN_S, MAX_AGAIN_S = 10.0, 60.0
"""Time between two tries while the head does not answer, or Ray does not start: at first, and at most."""
REFUSED = 2
"""Exit status of `orchard join` on a machine that differs from the head."""


def start_rejoiner(folder: ClusterFolder, pid: int, command: Sequence[str]) -> None:
    """Start the process, which ends by itself when this machine leaves or another process has joined.

    Args:
        folder: Of this machine; the process writes `rejoin.log` there.
        pid: Process of `ray start`, as in the membership.
        command: Joins again.

    Raises:
        FolderError: The log cannot be written.
    """
    log = folder.path / "rejoin.log"
    try:
        output = log.open("ab")
    except OSError as error:
        raise FolderError(f"{log} cannot be written: {error.strerror}") from None
    with output:
        subprocess.Popen(
            [sys.executable, "-m", "deployments.cluster.rejoin", str(pid), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def rejoin(folder: ClusterFolder, pid: int, command: Sequence[str]) -> int:
    """Join again whenever Ray has ended, until this machine has left or joined; return the exit status."""
    pause_s = AGAIN_S
    while (member := noted_membership(folder)) is not None and member.pid == pid:
        if member.is_running:
            time.sleep(POLL_S)
            continue
        _say(f"Ray has ended on this machine, which has not left the cluster of {member.head}: it joins again.")
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if status == REFUSED:
            _say("This machine differs from the head, and stays outside: repair it, then give `orchard join` again.")
            return status
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_AGAIN_S)
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the process; return its exit status."""
    try:
        return rejoin(ClusterFolder(), int(sys.argv[1]), sys.argv[2:])
    except FolderError as error:
        _say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
