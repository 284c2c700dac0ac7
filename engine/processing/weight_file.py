"""WeightFile: a safetensors file of a checkpoint, known by its header; and what the headers of a checkpoint tell."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_json

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

SAMPLE_BYTES = 4096


class WeightFile:
    """The header of a safetensors file, which must be valid, in a file of at least the announced size.

    Attributes:
        path: The file.
        tensors: By name: `dtype`, `shape` and `data_offsets`.

    Raises:
        EngineFailed: Names the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                limit = min(size - 8, MAX_HEADER_BYTES)
                if length > limit:
                    raise ValueError(f"the header length is {length} bytes; the limit is {limit}")
                self._header = file.read(length)
            self.tensors: dict[str, dict[str, Any]] = json.loads(self._header)
            self.tensors.pop("__metadata__", None)
            expected = 8 + length + max(map(_end, self.tensors.values()), default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise EngineFailed(f"{path}: this is not a readable safetensors file ({error})") from None
        if size < expected:
            declared = f"its header declares {expected}"
            raise EngineFailed(f"{path}: the file has {size} bytes, but {declared}; is it incomplete?")

    def samples(self) -> Iterator[bytes]:
        """Yield the header and the first SAMPLE_BYTES of each tensor, in the order of their names.

        Raises:
            EngineFailed: The file cannot be read.
        """
        yield self._header
        try:
            with self.path.open("rb") as file:
                for _, tensor in sorted(self.tensors.items()):
                    start, end = tensor["data_offsets"]
                    file.seek(8 + len(self._header) + start)
                    yield file.read(min(end - start, SAMPLE_BYTES))
        except OSError as error:
            raise EngineFailed(f"{self.path}: the weights cannot be read ({error})") from None


def _end(tensor: Mapping[str, Any]) -> int:
    """Return where a tensor's bytes end behind the header. Raises ValueError, TypeError or KeyError."""
    start, end = tensor["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"a tensor begins at byte {start} and ends at byte {end}")
    return end


def weight_files(model_dir: Path) -> list[WeightFile]:
    """Return the files of a checkpoint's weights by name, in milliseconds. Raises what WeightFile raises."""
    return [WeightFile(path) for path in sorted(model_dir.glob("*.safetensors"))]


def check_weights(model_dir: Path) -> None:
    """Check within milliseconds that the weights of a local checkpoint are readable, and all that an index names.

    Raises:
        EngineFailed: Names the file.
    """
    there = {path.name for path in model_dir.glob("*.safetensors")}
    for index in sorted(model_dir.glob("*.safetensors.index.json")):
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict):
            raise EngineFailed(f"{index}: expected an object `weight_map`")
        if missing := sorted({str(name) for name in named.values()} - there):
            raise EngineFailed(f"{index} names {len(missing)} files that are missing, such as {missing[0]}")
    if not weight_files(model_dir):
        raise EngineFailed(f"{model_dir}: there are no weights (*.safetensors)")


def has_output_layer(model_dir: Path) -> bool:
    """Return whether the weights of a local checkpoint have a tensor of the output layer."""
    return any("lm_head." in name for file in weight_files(model_dir) for name in file.tensors)


def num_parameters(model_dir: Path, config: dict[str, Any]) -> int:
    """Return the number of weights of a local checkpoint, counted as before a quantization.

    Args:
        model_dir: The checkpoint; without weights the number is 0.
        config: Its config.json, whose `quantization` has the bits of all modules and those of some.

    Raises:
        EngineFailed: A file cannot be read.
    """
    found = config.get("quantization")
    quantization = found if isinstance(found, dict) else {}
    tensors = {name: tensor for file in weight_files(model_dir) for name, tensor in file.tensors.items()}
    try:
        return sum(_num_weights(name, tensors, quantization) for name in tensors)
    except (KeyError, TypeError) as error:
        raise EngineFailed(f"{model_dir}: a tensor's header has no valid shape ({error!r})") from None


def _num_weights(name: str, tensors: dict[str, dict[str, Any]], quantization: dict[str, Any]) -> int:
    """Return the number of weights in a tensor; of scales and biases of quantized weights 0."""
    module, _, kind = name.rpartition(".")
    num, is_quantized = math.prod(tensors[name]["shape"]), f"{module}.scales" in tensors
    if not is_quantized or tensors.get(f"{module}.weight", {}).get("dtype") != "U32" or kind == "bias":
        return num
    if kind != "weight":
        return 0
    own = quantization.get(module)
    bits = (own if isinstance(own, dict) else quantization).get("bits")
    return num * 32 // bits if isinstance(bits, int) and bits > 0 else num


def fingerprint(model_dirs: Iterable[Path], *facts: str) -> str:
    """Return a hex digest of checkpoints and other facts.

    A checkpoint contributes its configurations, and name, shape and first 4 KiB of each tensor. Further training
    changes the start of every trained tensor; reading everything would take as long as loading the weights.

    Args:
        model_dirs: Directories of the checkpoints.
        facts: Other strings that the digest depends on.

    Raises:
        EngineFailed: A file of weights cannot be read.
    """
    digest = sha256("\0".join(facts).encode())
    for model_dir in model_dirs:
        for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
            if (path := model_dir / name).is_file():
                digest.update(name.encode() + path.read_bytes())
        for file in weight_files(model_dir):
            digest.update(file.path.name.encode())
            for sample in file.samples():
                digest.update(sample)
    return digest.hexdigest()
