"""The supervisor of the member process: starts it again when it was killed, since Ray reaches the head through it.

Run as `python -m deployments.commands.member_supervisor`, with the settings on its standard input. When it is killed
itself, the member process goes on.
"""

import signal
import subprocess
import sys
import time

AGAIN = "--again"
"""Argument of a member process that follows one that was killed."""
PAUSE_S = 1.0


def main() -> int:
    """Run the member process until it ends by itself; return its exit status."""
    settings, arguments = sys.stdin.read(), []
    while True:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.commands.member_process", *arguments], stdin=subprocess.PIPE, text=True
        )
        signal.signal(signal.SIGTERM, lambda signum, frame, process=process: process.terminate())
        process.communicate(settings)
        if process.returncode >= 0:
            return process.returncode
        sys.stderr.write(f"The member process was ended by signal {-process.returncode}; it is started again.\n")
        sys.stderr.flush()
        arguments = [AGAIN]
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
