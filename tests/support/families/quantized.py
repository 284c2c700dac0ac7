"""Families with quantized weights."""

from tests.support.families.family import (
    EXPERTS,
    KV,
    Family,
    text,
)

QUANTIZED: dict[str, Family] = {
    "qwen3 4-bit": Family(text("qwen3"), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "affine"}, seed=1),
    "qwen3 8-bit": Family(text("qwen3"), f"{KV}*3", {"group_size": 64, "bits": 8, "mode": "affine"}, seed=1),
    "qwen3 mxfp4": Family(text("qwen3"), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, seed=3),
    "qwen3 nvfp4": Family(text("qwen3"), f"{KV}*3", {"group_size": 16, "bits": 4, "mode": "nvfp4"}, seed=1),
    "qwen3_moe 4-bit": Family(
        text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "affine"}, seed=2
    ),
    "qwen3_moe 8-bit": Family(text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 8, "mode": "affine"}),
    "qwen3_moe mxfp4": Family(
        text("qwen3_moe", EXPERTS), f"{KV}*3", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, seed=3
    ),
}
