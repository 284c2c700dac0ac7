"""Available memory of the machine, or of the container that the process runs in."""

import logging
import math
from pathlib import Path

import psutil

log = logging.getLogger("orchard.engine")

CGROUP = Path("/sys/fs/cgroup")
MIN_AVAILABLE_SHARE = 0.07
"""Share of the machine's memory. Below 5 % Ray kills processes, and near 0 % the kernel does."""

RECOVERED = 1.25
"""After a shortage, this many times the minimum must be available before requests are accepted again."""


class HostMemory:
    """Detects shortages of memory.

    Args:
        min_available: Bytes; None for MIN_AVAILABLE_SHARE of the machine's memory.
        cgroup: Directory of the control group.
    """

    def __init__(self, min_available: int | None, cgroup: Path = CGROUP):
        self._cgroup = cgroup
        share = int(MIN_AVAILABLE_SHARE * total_bytes(cgroup))
        self._min_available = share if min_available is None else min_available
        self._is_short = False

    def shortage(self) -> str | None:
        """Return why new requests must be rejected, None with enough memory available. Never raises.

        After a shortage RECOVERED times the minimum must be available.
        """
        try:
            available = self.available()
        except Exception:  # the caller watches more than the memory
            log.exception("the available memory of the machine could not be read")
            return None
        needed = math.ceil(self._min_available * (RECOVERED if self._is_short else 1))
        self._is_short = available < needed
        if not self._is_short:
            return None
        return (
            f"the machine is short of memory: {available} bytes are available, "
            f"new requests need {needed} (memory.min_available_gb)"
        )

    def available(self) -> int:
        """Return the bytes that can be allocated without swapping."""
        available = psutil.virtual_memory().available
        limit, used = _read(self._cgroup / "memory.max"), _read(self._cgroup / "memory.current")
        if limit is None or used is None:
            return available
        return min(available, limit - used + _reclaimable(self._cgroup))


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of the machine, or the container's limit if that is lower."""
    limit, total = _read(cgroup / "memory.max"), psutil.virtual_memory().total
    return total if limit is None else min(limit, total)


def _read(path: Path) -> int | None:
    """Return the number in a file; None if it has none, or the file does not exist."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(cgroup: Path) -> int:
    """Return the bytes of inactive file pages."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == ["inactive_file"]), 0)
