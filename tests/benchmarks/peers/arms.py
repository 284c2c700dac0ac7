"""Arms of the comparison: Orchard and its peers, each in an environment of its own, on the same weights and BLAS."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import yaml

from engine.processing.checkpoint import DEMO_MODEL
from tests.benchmarks.measure import ROOT
from tests.e2e.server import SHIPPED_CONFIG
from tests.support import smollm2

MLX = "mlx[cpu]==0.32.4"
LIBRARIES = ("mlx-vlm==0.7.10", "mlx-lm==0.32.2", MLX, "mlx-audio==0.6.2", "transformers==5.23.0")
"""mlx-vlm's server imports mlx-audio."""

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that all arms serve.

    Attributes:
        name: In tables.
        path: In a format that all arms read.
        reads_images: Whether rows with images apply.
        has_tools: Whether rows with tools apply.
    """

    name: str
    path: Path
    reads_images: bool = False
    has_tools: bool = False


def demo(folder: Path) -> Checkpoint:
    """Return the demo model with float32 weights: other servers compute in the dtype of the checkpoint."""
    path = folder / "demo-float32"
    if not path.exists():
        partial = shutil.copytree(DEMO_MODEL, folder / "demo-partial", dirs_exist_ok=True)
        weights: Any = mx.load(str(DEMO_MODEL / "model.safetensors"))
        weights = {name: array.astype(mx.float32) for name, array in weights.items()}
        mx.save_safetensors(str(partial / "model.safetensors"), weights, metadata={"format": "pt"})
        config = (DEMO_MODEL / "config.json").read_text()
        (partial / "config.json").write_text(config.replace('"bfloat16"', '"float32"'))
        partial.rename(path)
    return Checkpoint("demo", path, reads_images=True, has_tools=True)


CHECKPOINTS: Mapping[str, Callable[[Path], Checkpoint]] = {
    "demo": demo,
    "smollm2": lambda folder: Checkpoint("SmolLM2-135M", smollm2.make(folder)),
    "smollm2-4bit": lambda folder: Checkpoint("SmolLM2-135M, 4 bits", smollm2.make(folder, quantized=True)),
}


@cache
def blas_library() -> str:
    """Return the path of the BLAS with which Orchard computes float32 products; peers would use MLX's slow default."""
    code = "from engine.worker import blas; print(blas.preload().path)"  # must come before MLX, which this process has
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@dataclass(frozen=True)
class Arm:
    """A server.

    Attributes:
        name: In tables.
        packages: Of its environment, whose folder has the name of the first; empty: that of the project.
        command: Of the server, from its environment's folder, the checkpoint, the port and a folder for files.
        ready: Path that answers 200 as soon as the model is served.
        reads_images: Whether rows with images apply.
    """

    name: str
    packages: tuple[str, ...]
    command: Callable[[Path, Checkpoint, int, Path], list[str]]
    ready: str
    reads_images: bool = True

    def environment(self, cache: Path) -> Path:
        """Return the folder of the environment's programs; the first time it is created from PyPI."""
        if not self.packages:
            return Path(sys.executable).parent
        folder = cache / self.packages[0].replace("==", "-")
        if not (folder / "complete").exists():
            subprocess.run(["uv", "venv", "-q", "--clear", "--python", "3.11", str(folder)], check=True)
            python = folder / "bin" / "python"
            subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *self.packages], check=True)
            (folder / "complete").touch()
        return folder / "bin"

    @contextmanager
    def serving(self, cache: Path, checkpoint: Checkpoint, port: int, out: Path) -> Iterator[str]:
        """Run the server; give its base URL. Raises RuntimeError if it is not ready in time."""
        command = self.command(self.environment(cache), checkpoint, port, out)
        environ = {**os.environ, "LD_PRELOAD": blas_library()} if self.packages else dict(os.environ)
        with (out / "server.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environ
            )
        try:
            base = f"http://127.0.0.1:{port}"
            self._wait(base, process)
            yield base
        finally:
            self._stop(process)

    def _wait(self, base: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(base + self.ready, timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s; see its server.log")

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of it and of its children
        process.wait()


def _orchard(programs: Path, checkpoint: Checkpoint, port: int, out: Path) -> list[str]:
    config = yaml.safe_load(SHIPPED_CONFIG.read_text())
    config["http_options"]["port"] = port
    if checkpoint.name != "demo":
        args = config["applications"][0]["args"]
        args["engine"]["model"] = str(checkpoint.path)
        args["spec_prefill"]["enabled"] = False  # no draft model has its tokenizer
    path = out / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(programs / "serve"), "run", str(path)]


def _module(module: str, *options: str) -> Callable[[Path, Checkpoint, int, Path], list[str]]:
    def command(programs: Path, checkpoint: Checkpoint, port: int, out: Path) -> list[str]:
        own = [option.format(model=checkpoint.path) for option in options]
        address = ["--model", str(checkpoint.path), "--host", "127.0.0.1", "--port", str(port)]
        return [str(programs / "python"), "-m", module, *address, *own]

    return command


def _program(name: str, *options: str) -> Callable[[Path, Checkpoint, int, Path], list[str]]:
    def command(programs: Path, checkpoint: Checkpoint, port: int, out: Path) -> list[str]:
        media = ["--mllm"] if checkpoint.reads_images else []
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return [str(programs / name), "serve", str(checkpoint.path), *media, *options, *address]

    return command


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("Orchard", (), _orchard, "/health/ready"),
        Arm("mlx-vlm", LIBRARIES, _module("mlx_vlm.server"), "/health"),
        Arm(
            "mlx-vlm, drafts",
            LIBRARIES,
            _module("mlx_vlm.server", "--draft-model", "{model}", "--draft-kind", "mtp"),
            "/health",
        ),
        Arm(
            "mlx-lm",
            LIBRARIES,
            _module("mlx_lm.server", "--decode-concurrency", "32", "--prompt-concurrency", "8"),
            "/v1/models",
            reads_images=False,
        ),
        Arm(
            "vllm-mlx",
            ("vllm-mlx==0.6.0", MLX),
            _program("vllm-mlx", "--offline", "--continuous-batching"),
            "/v1/models",
        ),
        Arm("Rapid-MLX", ("rapid-mlx==0.16.10", MLX), _program("rapid-mlx", "--yes", "--no-preflight"), "/readyz"),
    )
}
