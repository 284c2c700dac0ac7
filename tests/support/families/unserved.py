"""Model modules of the libraries that are not in the zoo, and why."""

PARTS = {
    *("__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "gear", "mla", "pipeline"),
    *("rope_utils", "ssm", "switch_layers"),
}
"""Modules of mlx_lm.models that other models share."""


def _cache(layer: int, kind: str) -> str:
    return f"layer {layer} keeps its state in a {kind}, which rows cannot share"


REFUSED_BY_CACHE: dict[str, str] = {
    "deepseek_v41": _cache(0, "DeepseekV41Cache"),
    "unlimited_ocr": _cache(0, "RingSlidingKVCache"),
    "z1t": _cache(0, "Z1TCache"),
}
"""Families that engine/worker/family.py refuses."""

NOT_IN_MLX_VLM = ("plamo3",)
"""Families of mlx_lm alone that engine/worker/family.py refuses. Its cache has one token less than its mask."""

_METAL = "its layers are Metal kernels alone, and the tests run on CPUs"
_TOWER = "the library loads no checkpoint without its tower, which is of a fixed size, too large for the tests"

UNTESTED: dict[str, str] = {
    "bitnet": _METAL,
    "fastvlm": _TOWER,
    "gemma3n": _TOWER,
    "mimo_v2": "its checkpoint needs embeddings of speech, of a fixed size of 100 MB",
    "muse_spark": _METAL,
    "paligemma": "the tokens of its prompts see each other; the tests of its images have texts as well",
    "phi3_v": "its language model is the whole model, with the tower; the tests of its images have texts as well",
    "prism_hadamard_qwen35": "it takes packed weights of 2 bits alone",
    "qwen3_omni_moe": "its language model is part of a part of the model, where the engine does not look for it",
}
"""Families that the engine may serve: nothing is known of their tokens, unless the reason says it."""

_EMBEDDING = "an embedding model"
_ENCODER = "an encoder, served for embeddings and scores alone"
_OTHERS: tuple[str, ...] = (
    *("colidefics3", "colqwen2_5", "embedding_gemma2", "llama_bidirec", "llama_nemotron_vl_embedding"),
    "qwen3_vl_embedding",
)
_ENCODERS: tuple[str, ...] = ("bert", "modernbert", "xlm_roberta")
NOT_TEXT: dict[str, str] = {**dict.fromkeys(_OTHERS, _EMBEDDING), **dict.fromkeys(_ENCODERS, _ENCODER)}
