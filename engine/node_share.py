"""What of a machine belongs to one of its engines: a GPU, or a part of the memory, and a folder of the disk tier."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.gpus import VISIBLE, cuda_gpus
from engine.host_memory import CPU_SHARE, total_bytes
from engine.protocol import EngineFailed


@dataclass(frozen=True)
class NodeShare:
    """One engine of a machine."""

    number: int = 0
    """From 0."""
    num_engines: int = 1
    """Engines of the machine."""

    def take_gpu(self, device: str) -> None:
        """Let this process see only the GPU of its engine. MLX must not be imported yet.

        Args:
            device: auto, cpu or gpu, as configured.

        Raises:
            EngineFailed: There is no GPU for this engine.
        """
        if self.num_engines == 1 or not (gpus := cuda_gpus(device)):
            return
        if self.number >= len(gpus):
            raise EngineFailed(
                f"engine {self.number + 1} of {self.num_engines} has no GPU: this machine has {len(gpus)}. Set "
                "engines_per_node, or the resource `mlx` of its Ray node, to that number or less"
            )
        os.environ[VISIBLE] = gpus[self.number]

    def of(self, config: EngineConfig, total: Callable[[], int] = total_bytes) -> EngineConfig:
        """Return the configuration of this engine alone.

        Engines on a CPU divide the default of memory.limit_gb, and all divide prefix_cache.disk.max_gb.

        Args:
            config: That of all engines.
            total: Returns the bytes of the machine's memory.
        """
        if self.num_engines == 1:
            return config
        changes: dict[str, Any] = {}
        if config.memory.limit_gb is None and not cuda_gpus(config.device):
            limit_gb = CPU_SHARE * total() / self.num_engines / 2**30
            changes["memory"] = config.memory.model_copy(update={"limit_gb": limit_gb})
        cache = config.prefix_cache
        if cache.disk is not None:
            path = Path(cache.disk.path) / f"engine-{self.number}"
            disk = {"path": str(path), "max_gb": cache.disk.max_gb / self.num_engines}
            port = cache.fetch_port and cache.fetch_port + self.number
            own = {"disk": cache.disk.model_copy(update=disk), "fetch_port": port}
            changes["prefix_cache"] = cache.model_copy(update=own)
        return config.model_copy(update=changes)
