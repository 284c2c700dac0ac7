"""How long a start takes until the first answer, phase by phase, and what it costs: several checkouts in turns.

    uv run python -m tests.benchmarks.start_bench --rounds 5 --arm before=../old:serve --arm after=.:serve \
        --arm orchard=.:orchard

An arm is NAME=CHECKOUT:COMMAND; the checkout has an environment of its own (.venv), the command is `serve` (for
`serve run FILE`) or `orchard` (for `orchard serve --config FILE`). Every run starts the checkout's own
serve_config.yaml on a free port of the loopback, asks one question as soon as it can, and stops the server with SIGINT.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
import yaml

from tests.benchmarks.measure import Spread, heading, table
from tests.e2e.server import free_port

TIMEOUT_S = 400.0
POLL_S = 0.1
BODY = json.dumps(
    {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
).encode()
LOGS = {
    "controller": "controller_[0-9]*.log",
    "proxy": "proxy_*.log",
    "build": "controller_build_*.log",
    "engine process": "replica_*ModelReplica*.log",
    "text planner": "replica_*TextMTP*.log",
    "ingress": "replica_*Ingress*.log",
}
"""Phase -> Serve's log whose first line ends it."""
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


@dataclass(frozen=True)
class Arm:
    name: str
    checkout: Path
    command: str
    """`serve` or `orchard`."""

    @classmethod
    def parse(cls, text: str) -> "Arm":
        name, _, rest = text.partition("=")
        checkout, _, command = rest.rpartition(":")
        if command not in ("serve", "orchard") or not checkout:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=CHECKOUT:serve or NAME=CHECKOUT:orchard")
        return cls(name, Path(checkout).resolve(), command)

    def command_line(self, config: Path) -> list[str]:
        more = ["run"] if self.command == "serve" else ["serve", "--config"]
        return [str(self.checkout / ".venv/bin" / self.command), *more, str(config)]


@dataclass(frozen=True)
class Start:
    """One start; all times in seconds after the command was started."""

    phases: dict[str, float]
    cpu_s: float
    """CPU seconds of all processes of the server, up to the first answer."""
    memory_mb: float
    """Proportional set size of all processes of the server at the first answer, MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", type=Arm.parse, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(heading("start to the first answer: median [lowest highest]"))
    starts: dict[str, list[Start]] = {arm.name: [] for arm in options.arm}
    for number in range(1, options.rounds + 1):
        for arm in options.arm:
            start = measure(arm)
            starts[arm.name].append(start)
            print(
                f"round {number} {arm.name}: {start.phases['first answer']:.1f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(figures(starts))


def measure(arm: Arm) -> Start:
    directory = Path(tempfile.mkdtemp(prefix="ost-", dir="/tmp"))
    config = yaml.safe_load((arm.checkout / "serve_config.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    path = directory / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    began = time.time()
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            arm.command_line(path),
            cwd=arm.checkout,
            env={**inherited, "RAY_TMPDIR": str(directory)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_answer(process, port, directory / "output")
        answered = time.time() - began
        cpu_s, memory_mb = cost(process.pid)
        phases = {**{name: at - began for name, at in first_lines(directory)}, "first answer": answered}
        process.send_signal(signal.SIGINT)
        process.wait(90)
        return Start(phases, cpu_s, memory_mb)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def wait_for_answer(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    url, deadline = f"http://127.0.0.1:{port}/v1/chat/completions", time.monotonic() + TIMEOUT_S
    request = urllib.request.Request(url, BODY, {"Content-Type": "application/json"})
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{output.read_text()[-4000:]}")
    raise SystemExit(f"no answer within {TIMEOUT_S:g} s:\n{output.read_text()[-4000:]}")


def cost(pid: int) -> tuple[float, float]:
    """CPU seconds and MB of a process and all its descendants."""
    root = psutil.Process(pid)
    cpu_s, num_bytes = 0.0, 0
    for process in [root, *root.children(recursive=True)]:
        try:
            times, memory = process.cpu_times(), process.memory_full_info()
        except psutil.Error:
            continue
        cpu_s += times.user + times.system
        num_bytes += getattr(memory, "pss", memory.rss)
    return cpu_s, num_bytes / 1e6


def first_lines(directory: Path) -> Iterable[tuple[str, float]]:
    """When each phase's log began, Unix time."""
    for name, pattern in LOGS.items():
        for path in sorted(directory.glob(f"**/session_*/logs/serve/{pattern}")):
            if not path.parent.parent.parent.is_symlink() and (stamp := STAMP.search(path.read_text(errors="replace"))):
                yield name, datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def figures(starts: dict[str, list[Start]]) -> str:
    names = [*LOGS, "first answer"]
    rows = [[f"{name}, s", *(spread(s.phases.get(name) for s in arm) for arm in starts.values())] for name in names]
    rows.append(["CPU, s", *(spread(s.cpu_s for s in arm) for arm in starts.values())])
    rows.append(["memory, MB", *(spread(s.memory_mb for s in arm) for arm in starts.values())])
    return table(["", *starts], rows)


def spread(values: Iterable[float | None]) -> str:
    """Median, and lowest and highest, of those that were measured."""
    known = [value for value in values if value is not None]
    return f"{Spread.of(known):.1f}" if known else "-"


if __name__ == "__main__":
    main()
