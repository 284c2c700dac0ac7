"""At most one engine per GPU: processes on one GPU do not see each other's memory, and Macs panic when it runs out.

Any number of engines may run on a CPU.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.errors import EngineFailed
from engine.gpus import VISIBLE
from engine.process_lock import LockHeld, ProcessLock, holder_of, lock_path

TIMEOUT_S = 10.0
"""Wait for an engine that is shutting down, as when a replica is replaced."""

GPU_KINDS = ("metal", "cuda")


def lock_device(kind: str, share_device: bool, timeout_s: float | None = None) -> ProcessLock | None:
    """Take the device for this process; release the lock once the weights are freed.

    Args:
        kind: cpu, metal or cuda.
        share_device: Whether engines may share the device; the operator is responsible for their total memory.
        timeout_s: How long to wait for the device; None for TIMEOUT_S.

    Returns:
        The lock; None if none is needed.

    Raises:
        EngineFailed: Another process holds the device, or the lock's file cannot be written.
    """
    if kind not in GPU_KINDS or share_device:
        return None
    try:
        return ProcessLock(lock_path(_name(kind)), TIMEOUT_S if timeout_s is None else timeout_s)
    except LockHeld as held:
        raise EngineFailed(_refusal(kind, held.holder)) from None
    except OSError as error:
        raise EngineFailed(
            f"the GPU lock cannot be acquired ({error}); make the directory writable, or set engine.share_device: "
            "true if no other engine uses this GPU"
        ) from None


@contextmanager
def starting(kind: str, share_device: bool) -> Iterator[ProcessLock | None]:
    """Lock the device for an engine that starts within the block; release the lock if the start fails.

    Args:
        kind: See lock_device.
        share_device: See lock_device.

    Raises:
        EngineFailed: See lock_device.
    """
    lock = lock_device(kind, share_device)
    try:
        yield lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def device_refusal(device: str, share_device: bool, gpus: Sequence[str] = ()) -> str | None:
    """Return why engines with this configuration could not take their GPUs now; None if they could, or need none.

    Args:
        device: auto, cpu or gpu, as configured. MLX is not imported.
        share_device: As configured.
        gpus: The NVIDIA GPUs, one per engine; none: the first one.
    """
    if device == "cpu" or share_device:
        return None
    for kind, gpu in [("metal", None), *(("cuda", gpu) for gpu in gpus or [None])]:
        if (holder := holder_of(lock_path(_name(kind, gpu)))) is not None:
            return _refusal(kind, holder)
    return None


def _name(kind: str, gpu: str | None = None) -> str:
    """Return the lock's name. gpu: an NVIDIA GPU; None: the first visible one, which MLX uses. A Mac has one."""
    index = (gpu or os.environ.get(VISIBLE, "").split(",")[0].strip()) if kind == "cuda" else ""
    return f"device-{kind}-{index.replace('/', '_') or 0}"


def _refusal(kind: str, holder: str) -> str:
    return (
        f"the {kind} GPU is in use by an engine in {holder}. Stop that process first; if the memory of the GPU is "
        "enough for both, set engine.share_device: true and engine.memory.limit_gb"
    )
