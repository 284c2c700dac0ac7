"""Weights of checkpoints, read by the headers of their files: damaged files are named, and never read beyond."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.demo import DEMO_MODEL
from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.processing.weight_file import check_weights, fingerprint, has_output_layer, num_parameters


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a readable"),
        (b"\x01\x02", "not a readable"),
        (header(b"{}", 2**60), "the header length is 1152921504606846976 bytes; the limit is 2"),
        (header(b"{}", 3), "the header length is 3 bytes; the limit is 2"),
        (header(b"{"), "not a readable"),
        (header(b"[]"), "not a readable"),
        (header(b"\xff\xfe"), "not a readable"),
        (header(json.dumps({"a": 1}).encode()), "not a readable"),
        (header(json.dumps({"a": {}}).encode()), "not a readable"),
        (
            header(json.dumps({"a": TENSOR | {"data_offsets": [16, 0]}}).encode()),
            "begins at byte 16 and ends at",
        ),
        (header(json.dumps({"a": TENSOR | {"data_offsets": [-1, 0]}}).encode()), "begins at byte -1"),
        (header(json.dumps({"a": TENSOR | {"data_offsets": ["a", 4]}}).encode()), "not a readable"),
        (header(json.dumps({"a": TENSOR | {"data_offsets": [0]}}).encode()), "not a readable"),
        (header(b'{"a":' * 100_000), "not a readable"),
        (header(json.dumps({"a": TENSOR}).encode()) + b"\0" * 15, "has 88 bytes, but its header declares 89"),
    ],
)
def test_a_damaged_file_is_named_by_each_reader(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "model.safetensors").write_bytes(content)
    for read in (
        check_weights,
        has_output_layer,
        lambda path: num_parameters(path, {}),
        lambda path: fingerprint([path]),
    ):
        with pytest.raises(EngineFailed, match=rf"model.safetensors: .*{reason}"):
            read(tmp_path)


def test_a_tensor_without_a_shape_has_no_number_of_weights(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(header(json.dumps({"a": {"data_offsets": [0, 0]}}).encode()))
    with pytest.raises(EngineFailed, match="no valid shape"):
        num_parameters(tmp_path, {})


def test_weights_that_an_index_names_must_be_there(tmp_path: Path):
    with pytest.raises(EngineFailed, match=r"there are no weights \(\*\.safetensors\)"):
        check_weights(tmp_path)
    save_file({"a": np.zeros(4)}, tmp_path / "model-1.safetensors")
    check_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(EngineFailed, match=r"names 1 files that are missing, such as model-2\.safetensors"):
        check_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(EngineFailed, match="expected an object `weight_map`"):
        check_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"), [("lm_head.weight", True), ("model.language_model.lm_head.bias", True), ("head", False)]
)
def test_an_output_layer_is_found_by_its_name(tmp_path: Path, name: str, found: bool):
    save_file({name: np.zeros(4)}, tmp_path / "model.safetensors")
    assert has_output_layer(tmp_path) is found


def test_the_fingerprint_depends_on_the_beginning_of_each_tensor_and_on_the_facts(tmp_path: Path):
    found = set[str]()
    for first, second in ((0, 0), (1, 0), (0, 1)):
        save_file({"a": np.full(4, first), "b": np.full(4, second)}, tmp_path / "model.safetensors")
        found |= {fingerprint([tmp_path]), fingerprint([tmp_path], "bits 4")}
    assert len(found) == 6


def test_parameters_of_the_demo_are_the_numbers_of_its_file():
    with safe_open(DEMO_MODEL / "model.safetensors", "numpy") as file:
        expected = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert num_parameters(DEMO_MODEL, read_config(DEMO_MODEL)) == expected > 10**7


@pytest.mark.parametrize(("bits", "own"), [(4, 8), (8, None), (6, 4)])
def test_quantized_weights_count_as_before(tmp_path: Path, bits: int, own: int | None):
    """Matrices of 64 x 128 in groups of 32, of which the second may have bits of its own; a bias, and a norm."""

    def packed(bits: int) -> dict[str, np.ndarray]:
        scales = np.zeros((64, 4), np.float16)
        return {"weight": np.zeros((64, 128 * bits // 32), np.uint32), "scales": scales, "biases": scales}

    modules = {"layers.0.up": packed(bits), "layers.0.down": packed(own or bits), "norm": {"weight": np.ones(128)}}
    tensors = {f"{module}.{kind}": array for module, arrays in modules.items() for kind, array in arrays.items()}
    save_file(tensors | {"layers.0.up.bias": np.zeros(64, np.float16)}, tmp_path / "model.safetensors")
    quantization: dict[str, Any] = {"bits": bits, "group_size": 32} | ({"layers.0.down": {"bits": own}} if own else {})
    assert num_parameters(tmp_path, {"quantization": quantization}) == 2 * 64 * 128 + 128 + 64


def test_a_checkpoint_without_weights_has_no_parameters(tmp_path: Path):
    assert num_parameters(tmp_path, {}) == 0
