"""How much memory the machine, or the container that we run in, has left."""

import logging
from pathlib import Path

import psutil

log = logging.getLogger("orchard.engine")

CGROUP = Path("/sys/fs/cgroup")
MIN_AVAILABLE_SHARE = 0.07
"""Of the machine's memory. With less than a twentieth Ray ends processes, and near nothing the kernel does."""

RECOVERED = 1.25
"""New requests are taken again with so many times as much available as they are turned away with."""


class HostMemory:
    """`shortage` says why new work must not begin. min_available: bytes, None for a share of the machine's."""

    def __init__(self, min_available: int | None, cgroup: Path = CGROUP):
        self._cgroup = cgroup
        share = int(MIN_AVAILABLE_SHARE * total_bytes(cgroup))
        self._min_available = share if min_available is None else min_available
        self._is_short = False

    def shortage(self) -> str | None:
        """None with enough available. Once short, it must be a quarter more than the limit. Never raises."""
        try:
            available = self.available()
        except Exception:  # whoever asks has more to watch
            log.exception("how much memory the machine has left could not be read")
            return None
        self._is_short = available < self._min_available * (RECOVERED if self._is_short else 1)
        if not self._is_short:
            return None
        return (
            f"the machine is short of memory: {available} bytes are available, "
            f"new requests need {self._min_available} (memory.min_available_gb)"
        )

    def available(self) -> int:
        """Bytes that can be had without pushing others out."""
        available = psutil.virtual_memory().available
        limit, used = _read(self._cgroup / "memory.max"), _read(self._cgroup / "memory.current")
        if limit is None or used is None:
            return available
        return min(available, limit - used + _reclaimable(self._cgroup))


def total_bytes(cgroup: Path = CGROUP) -> int:
    limit, total = _read(cgroup / "memory.max"), psutil.virtual_memory().total
    return total if limit is None else min(limit, total)


def _read(path: Path) -> int | None:
    """None without a limit, and without control groups."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(cgroup: Path) -> int:
    """Of files' pages that nobody has used lately."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == ["inactive_file"]), 0)
