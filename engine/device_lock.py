"""One engine per GPU: two processes that own one GPU do not see each other's memory, and Macs panic when it runs out.

On a CPU any number of engines may run.
"""

import os

from engine.process_lock import LockHeld, ProcessLock, holder_of, lock_path
from engine.protocol import EngineFailed

TIMEOUT_S = 10.0
"""For an engine that is just ending, as when a replica is replaced."""

GPU_KINDS = ("metal", "cuda")


def lock_device(kind: str, share_device: bool, timeout_s: float | None = None) -> ProcessLock | None:
    """Take the device for this process, to be released when the weights are gone.

    Args:
        kind: cpu, metal or cuda.
        share_device: the operator answers for what engines on the device take together.

    Returns:
        The lock; None where none is needed.

    Raises:
        EngineFailed: another process holds the device.
    """
    if kind not in GPU_KINDS or share_device:
        return None
    try:
        return ProcessLock(lock_path(_name(kind)), TIMEOUT_S if timeout_s is None else timeout_s)
    except LockHeld as held:
        raise EngineFailed(_refusal(kind, held.holder)) from None
    except OSError as error:
        raise EngineFailed(
            f"the lock of the GPU cannot be taken ({error}); make the directory writable, or set engine.share_device: "
            "true if no other engine uses this GPU"
        ) from None


def device_refusal(device: str, share_device: bool) -> str | None:
    """Why an engine with this configuration could not take its GPU now; None if it could, or needs none.

    device: auto, cpu or gpu, as configured. MLX is not imported for this.
    """
    if device == "cpu" or share_device:
        return None
    for kind in GPU_KINDS:
        if (holder := holder_of(lock_path(_name(kind)))) is not None:
            return _refusal(kind, holder)
    return None


def _name(kind: str) -> str:
    """MLX uses the first of the visible GPUs; a Mac has one."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() if kind == "cuda" else ""
    return f"device-{kind}-{index.replace('/', '_') or 0}"


def _refusal(kind: str, holder: str) -> str:
    return (
        f"the {kind} GPU is in use by an engine in {holder}. Stop that process first; if the memory of the GPU is "
        "enough for both, set engine.share_device: true and engine.memory.limit_gb"
    )
