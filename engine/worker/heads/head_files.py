"""Reads the checkpoints of heads: whether there is one, its tensors, and whether it fits its target."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config


def has_tensors(model_dir: Path, splitter: type[MTPSplitter]) -> bool:
    """Return whether a checkpoint has tensors that the library's splitter takes for those of a head."""
    reader = splitter()
    text_config = reader.read_text_config(read_config(model_dir))
    return any(True for _ in reader.iter_selected(model_dir, text_config))


def read_head(
    head_dir: Path, split_types: tuple[str, ...], splitters: dict[str, type[MTPSplitter]]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return configuration and lazy tensors of a head, by the names of the library's module.

    Args:
        head_dir: A split head, or a checkpoint of a family whose splitter is given.
        split_types: See HeadFormat.
        splitters: By the model_type of a checkpoint.

    Raises:
        EngineFailed: It is neither.
    """
    config = read_config(head_dir)
    family = config.get("model_type")
    if family in split_types:
        return config, split_tensors(head_dir)
    if family not in splitters:
        expected = ", ".join((*split_types, *splitters))
        raise EngineFailed(f"the MTP head in {head_dir}: model_type is {family!r}, expected one of {expected}")
    return splitters[family]().prepare(head_dir)


def split_tensors(head_dir: Path) -> dict[str, mx.array]:
    """Return the lazy tensors of all files of a split head."""
    weights: dict[str, mx.array] = {}
    for file in sorted(head_dir.glob("*.safetensors")):
        weights |= mx.load(str(file))  # type: ignore[arg-type]
    return weights


def check_fit(head: dict[str, Any], target: dict[str, Any], head_dir: Path) -> None:
    """Compare what a head and its target must have in common.

    Raises:
        EngineFailed: They differ; names each value.
    """
    wrong = [f"{key} is {head.get(key)}, expected {target[key]}" for key in target if head.get(key) != target[key]]
    if wrong:
        raise EngineFailed(f"the MTP head in {head_dir} does not fit the model: {'; '.join(wrong)}")
