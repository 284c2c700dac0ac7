"""NodeShare: the GPU or the part of the memory, and the folder of the disk tier, that one engine of a machine uses."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.gpus import VISIBLE, cuda_gpus, has_metal
from engine.host_memory import CPU_SHARE, total_bytes

MAX_PORT = 65535


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
            EngineFailed: There is no GPU for this engine, or the machine is a Mac, whose GPU has one engine.
        """
        if self.num_engines == 1:
            return
        if has_metal(device):
            raise EngineFailed(
                f"this Mac is to hold {self.num_engines} engines, and its GPU can have one: its Ray node offers as "
                "much of the resource `mlx`. Start it again with --resources='{\"mlx\": 1}', or set engine.device: cpu"
            )
        if not (gpus := cuda_gpus(device)):
            return
        if self.number >= len(gpus):
            raise EngineFailed(
                f"engine {self.number + 1} of {self.num_engines} has no GPU: this machine has {len(gpus)}. Set "
                "engines_per_node, or the resource `mlx` of its Ray node, to that number or less"
            )
        os.environ[VISIBLE] = gpus[self.number]

    def of(self, config: EngineConfig, total: Callable[[], int] = total_bytes) -> EngineConfig:
        """Return the configuration of this engine alone.

        Engines on a CPU divide the default of memory.limit_gb, and all divide prefix_cache.disk.max_gb. The first one
        has the folder of prefix_cache.disk.path, so that it finds the snapshots of a machine that had one engine.

        Args:
            config: That of all engines.
            total: Returns the bytes of the machine's memory.

        Raises:
            EngineFailed: There is no port for this engine above prefix_cache.fetch_port.
        """
        if self.num_engines == 1:
            return config
        changes: dict[str, Any] = {}
        if self._divides_memory(config):
            limit_gb = CPU_SHARE * total() / self.num_engines / 2**30
            changes["memory"] = config.memory.model_copy(update={"limit_gb": limit_gb})
        cache = config.prefix_cache
        if cache.disk is not None:
            path = Path(cache.disk.path) / f"engine-{self.number}" if self.number else cache.disk.path
            disk = {"path": str(path), "max_gb": cache.disk.max_gb / self.num_engines}
            own = {"disk": cache.disk.model_copy(update=disk), "fetch_port": self._port(cache.fetch_port)}
            changes["prefix_cache"] = cache.model_copy(update=own)
        return config.model_copy(update=changes)

    def explained(self, reason: str, config: EngineConfig) -> str:
        """Return a refusal; if it names memory.limit_gb, which is this engine's share by default, with that added.

        Args:
            reason: The refusal.
            config: The configuration of all engines.
        """
        if not self._divides_memory(config) or "memory.limit_gb" not in reason:
            return reason
        return (
            f"{reason} (memory.limit_gb is not set: each of {self.num_engines} engines here has a share of the memory)"
        )

    def _divides_memory(self, config: EngineConfig) -> bool:
        return self.num_engines > 1 and config.memory.limit_gb is None and not cuda_gpus(config.device)

    def _port(self, first: int) -> int:
        """Return the port of this engine; 0: any free one. first: prefix_cache.fetch_port. Raises EngineFailed."""
        if first and (port := first + self.number) > MAX_PORT:
            raise EngineFailed(
                f"prefix_cache.fetch_port is {first}, and engine {self.number} of this machine would have the port "
                f"{port}, above {MAX_PORT}. Set it to {MAX_PORT - self.num_engines + 1} or less"
            )
        return first and first + self.number
