"""Parts that every benchmark shares: percentiles and spreads, a process's CPU time, and where the figures come from."""

import math
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
LIBRARIES = ("ray", "mlx", "mlx-lm", "mlx-vlm", "transformers", "numpy")


def percentile(values: Iterable[float], q: float) -> float:
    """q from 0 to 100, linear between the two nearest values; nan when there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Spread:
    """The spread of one figure over the rounds of a benchmark."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values)) if values else cls(math.nan, math.nan, math.nan)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}} {self.high:{spec}}]"


class CpuMeter:
    """CPU seconds, user and system, that processes of this machine have used since `start`."""

    def __init__(self, pids: Iterable[int]):
        self._processes = [psutil.Process(pid) for pid in pids]
        self.start()

    def start(self) -> None:
        self._cpu_s, self._began = self._now(), time.monotonic()

    def cpu_s(self) -> float:
        return self._now() - self._cpu_s

    def wall_s(self) -> float:
        return time.monotonic() - self._began

    def _now(self) -> float:
        return sum(t.user + t.system for t in (process.cpu_times() for process in self._processes))


class CpuTrace:
    """The CPU seconds of processes over time, sampled from a thread while the context lasts."""

    PERIOD_S = 0.1

    def __init__(self, pids: Iterable[int]):
        self._meter = CpuMeter(pids)
        self.samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "CpuTrace":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float:
        """CPU seconds from `begin` to `end` by time.monotonic()."""
        times, cpu_s = zip(*self.samples, strict=True)
        return float(np.interp(end, times, cpu_s) - np.interp(begin, times, cpu_s))

    def _sample(self) -> None:
        while True:
            self.samples.append((time.monotonic(), self._meter.cpu_s()))
            if self._over.wait(self.PERIOD_S):
                return


def provenance() -> dict[str, Any]:
    """The machine, the commit, the libraries and the date: without them a figure means nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.platform()}, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def heading(title: str) -> str:
    p = provenance()
    libraries = ", ".join(f"{name} {number}" for name, number in p["libraries"].items())
    return (
        f"{title}\n{p['cpu']}, {p['cores']} cores, {p['memory_gib']} GiB, load {p['load']}; {p['os']}\n"
        f"commit {p['commit']}, {p['date']}; {libraries}"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" (dirty)" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        sysctl = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return sysctl.stdout.strip() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
