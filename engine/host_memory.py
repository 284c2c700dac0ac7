"""Available memory of the machine, or of the container that the process runs in."""

import ctypes
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

log = logging.getLogger("orchard.engine")

CGROUP = Path("/sys/fs/cgroup")
MIN_AVAILABLE_SHARE = 0.07
"""Share of the machine's memory. Below 5 % Ray kills processes, and near 0 % the kernel does."""

CPU_SHARE = 0.8
"""Share of the machine's memory for engines on a CPU, where other processes need memory as well."""

RECOVERED = 1.25
"""After a shortage, this many times the minimum must be available before requests are accepted again."""


NORMAL_PRESSURE, CRITICAL_PRESSURE = 1, 4
"""Levels of macOS, which has one more between them."""

SMALL_MAC_BYTES = 16 * 2**30


def kernel_pressure() -> int | None:
    """Return the level of memory pressure that macOS sees; None on other systems."""
    if sys.platform != "darwin":
        return None
    level = ctypes.c_int()
    size = ctypes.c_size_t(ctypes.sizeof(level))
    libc = ctypes.CDLL(None, use_errno=True)
    name = b"kern.memorystatus_vm_pressure_level"
    if libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError(ctypes.get_errno(), f"{name.decode()} cannot be read")
    return level.value


class HostMemory:
    """Detects shortages of memory: by a minimum of available bytes or, on macOS, by the kernel's own level.

    On macOS the available bytes that can be read leave out compressed and purgeable pages and those of files, so that
    a Mac without any pressure shows a few percent. A minimum that the operator has set is compared with them all the
    same.

    Args:
        min_available: Bytes; None for the kernel's level or, without one, MIN_AVAILABLE_SHARE of the machine's memory.
        cgroup: Directory of the control group.
        pressure: Returns the kernel's level.
    """

    def __init__(
        self,
        min_available: int | None,
        cgroup: Path = CGROUP,
        pressure: Callable[[], int | None] = kernel_pressure,
    ):
        self._cgroup = cgroup
        share = int(MIN_AVAILABLE_SHARE * total_bytes(cgroup))
        self._min_available = share if min_available is None else min_available
        self._pressure = pressure if min_available is None else lambda: None
        self._is_short = False

    def shortage(self) -> str | None:
        """Return why new requests must be rejected, None with enough memory available. Never raises.

        After a shortage RECOVERED times the minimum must be available, or the kernel's level be normal again.
        """
        try:
            level, available = self._pressure(), self.available()
        except Exception:  # the caller watches more than the memory
            log.exception("the available memory of the machine could not be read")
            return None
        if level is not None:
            self._is_short = level >= CRITICAL_PRESSURE or (self._is_short and level > NORMAL_PRESSURE)
            return (
                f"the machine is short of memory: macOS reports pressure of level {level}" if self._is_short else None
            )
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


def on_small_mac() -> bool:
    """Return whether this is a Mac with so little memory that the server should take less by default."""
    return sys.platform == "darwin" and total_bytes() <= SMALL_MAC_BYTES


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
