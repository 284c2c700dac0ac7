"""The GPUs of this machine that engines use, and how many engines it holds. MLX is not imported."""

import ctypes
import os
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Literal

from engine.errors import EngineFailed

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the GPUs that a process sees, the first of which MLX uses: numbers or UUIDs, separated by commas."""

NO_GPUS = ("", "NoDevFiles")
"""Entries of this variable that end the list; schedulers of batch jobs write the second one."""

GPU_NAME = re.compile(r"-?[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+|NoDevFiles|")

MAX_ENGINES = 16
"""The most engines of one machine."""

CUDA_BACKENDS = ("mlx-cuda-13", "mlx-cuda-12")


def has_cuda_backend() -> bool:
    """Tell whether MLX has been installed with its CUDA backend."""
    for name in CUDA_BACKENDS:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def cuda_gpus(device: str) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that engines may use, as CUDA_VISIBLE_DEVICES names them; () on a CPU or a Mac.

    Like CUDA, it ends at the first number that no GPU has.

    Args:
        device: auto, cpu or gpu, as configured.

    Raises:
        EngineFailed: CUDA_VISIBLE_DEVICES names a GPU twice, or something else than GPUs.
    """
    if device == "cpu" or sys.platform == "darwin" or not has_cuda_backend():
        return ()
    num_gpus = _num_gpus()
    if (visible := os.environ.get(VISIBLE)) is None:
        return tuple(map(str, range(num_gpus)))
    names = [name.strip() for name in visible.split(",")]
    if wrong := next((name for name in names if not GPU_NAME.fullmatch(name)), None):
        raise EngineFailed(f"{VISIBLE} is {visible!r}: {wrong!r} is neither the number nor the UUID of a GPU")
    found = tuple(takewhile(lambda name: _is_gpu(name, num_gpus), names))
    if twice := next((name for index, name in enumerate(found) if name in found[:index]), None):
        raise EngineFailed(f"{VISIBLE} is {visible!r}, which names the GPU {twice} twice. Name each GPU once")
    return found


def see_one_gpu() -> None:
    """Let this process see only the first of its NVIDIA GPUs, the one that MLX uses. MLX must not be imported yet.

    With two to see, an engine failed at its start: MLX 0.32.4 could not copy an array from the host to the device
    (`cudaMemcpy(...) failed: invalid argument`), although arrays can be made at first. A
    variable that `cuda_gpus` refuses is left as it is. Processes that this one starts see that GPU alone too.
    """
    with suppress(EngineFailed):
        if len(gpus := cuda_gpus("auto")) > 1:
            os.environ[VISIBLE] = gpus[0]


def has_metal(device: str) -> bool:
    """Tell whether engines use the GPU of a Mac, which is one. device: auto, cpu or gpu, as configured."""
    return sys.platform == "darwin" and device != "cpu"


def num_engines(asked: Literal["all"] | int, device: str) -> int:
    """Return the number of engines of this machine.

    Args:
        asked: The option engines_per_node.
        device: auto, cpu or gpu, as configured.

    Raises:
        EngineFailed: There are fewer GPUs than engines, or see cuda_gpus.
    """
    num_gpus = len(cuda_gpus(device)) or int(has_metal(device))
    if asked == "all":
        return min(max(1, num_gpus), MAX_ENGINES)
    if asked > max(1, num_gpus) and (num_gpus or device == "gpu"):
        gpus = {0: "no GPU that MLX can use", 1: "one GPU"}.get(num_gpus, f"{num_gpus} GPUs")
        shown = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
        raise EngineFailed(
            f"engines_per_node is {asked}, and this machine has {gpus}{shown}: each engine needs a GPU of its own. "
            f"Set engines_per_node to {max(1, num_gpus)} or less, or to all"
        )
    return asked


def _is_gpu(name: str, num_gpus: int) -> bool:
    if name in NO_GPUS:
        return False
    return 0 <= int(name) < num_gpus if name.lstrip("-").isdigit() else True


def _num_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver shows to this process or container; 0 without the driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    nvml.nvmlShutdown()
    return count.value
