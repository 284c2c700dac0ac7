"""The server's processes: what they hold, and whether they are still the same."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import psutil

MIB = 2**20
SAMPLED_EVERY_S = 0.25
REPLICAS = ("engines", "ingress", "text", "mllm", "spec_prefill")
PROXY = "ProxyActor"


@dataclass(frozen=True)
class ProcessFigures:
    """By one process. rss: bytes. kept: bytes of it that MLX keeps for reuse, up to the configured mlx_cache_mb.
    num_workers: processes that it has started for its work."""

    pid: int
    rss: int
    kept: int
    num_fds: int
    num_threads: int
    num_workers: int

    @property
    def in_use(self) -> int:
        return self.rss - self.kept

    def __str__(self) -> str:
        kept = f" ({self.kept / MIB:.0f} kept by MLX)" if self.kept else ""
        counts = f"{self.num_fds} files, {self.num_threads} threads, {self.num_workers} workers"
        return f"{self.rss / MIB:.0f} MiB{kept}, {counts}"


def find_processes(status: dict[str, Any], root: int) -> dict[str, psutil.Process]:
    """Every replica of the graph, by the status page, and the HTTP proxies. root: pid of `serve run`."""
    found = {f"{name} {i}": psutil.Process(one["pid"]) for name in REPLICAS for i, one in enumerate(status[name] or ())}
    proxies = [one for one in psutil.Process(root).children(recursive=True) if PROXY in " ".join(one.cmdline())]
    return found | {f"proxy {i}": one for i, one in enumerate(proxies)}


def look_at(processes: dict[str, psutil.Process], status: dict[str, Any]) -> dict[str, ProcessFigures]:
    """Those that are alive."""
    kept = {f"engines {i}": one["engine"]["memory"]["mlx_cache_bytes"] for i, one in enumerate(status["engines"])}
    scorers = status["spec_prefill"] or ()
    kept |= {f"spec_prefill {i}": one["scorer"]["memory"]["mlx_cache_bytes"] for i, one in enumerate(scorers)}
    return {
        name: ProcessFigures(
            process.pid,
            process.memory_info().rss,
            kept.get(name, 0),
            process.num_fds(),
            process.num_threads(),
            len(process.children(recursive=True)),
        )
        for name, process in processes.items()
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    }


class Peaks(threading.Thread):
    """Watches the memory of processes together with the workers that each of them has started."""

    def __init__(self, processes: dict[str, psutil.Process]):
        super().__init__(daemon=True)
        self._processes = processes
        self._over = threading.Event()
        self.rss: dict[str, int] = dict.fromkeys(processes, 0)

    def run(self) -> None:
        while not self._over.wait(SAMPLED_EVERY_S):
            for name, process in self._processes.items():
                self.rss[name] = max(self.rss[name], _rss_with_workers(process))

    def end(self) -> dict[str, int]:
        self._over.set()
        self.join()
        return self.rss


def _rss_with_workers(process: psutil.Process) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended since
                total += one.memory_info().rss
    return total
