"""Tiny checkpoints of rerankers, as sentence-transformers 5.4 saves them: a causal model, a LogitScore, a template."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from tests.support.families import FAMILIES, Family
from tests.support.tiny import Tiny, build
from tests.support.zoo import empty_cache, load, make

YES, NO = 301, 77
"""Tokens whose logits are compared."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided.<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Rank") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""


def prompt_of(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """Return what TEMPLATE writes; like jinja2, without the last line break."""
    lines: list[str] = list(TEMPLATE.split("\n"))
    lines[3] = f"<Instruct>: {instruction}"
    lines[4] = f"<Query>: {query}"
    lines[5] = f"<Document>: {document}<|im_end|>"
    return "\n".join(lines).removesuffix("\n")


def make_reranker(out: Path, family: str, **changes: Any) -> Path:
    """Write a family's checkpoint, without a tokenizer. changes: of config.json."""
    known = FAMILIES[family]
    return describe_reranker(make(out, Family({**known.config, **changes}, "", known.quantization, seed=known.seed)))


def tiny_reranker(out: Path, **settings: Any) -> Path:
    """Write a checkpoint with a tokenizer. settings: of config_sentence_transformers.json."""
    path = describe_reranker(build(out, Tiny(layers=2, interval=2, mtp=False)), **settings)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def library_log_odds(path: Path, ids: list[int]) -> float:
    """The difference of the library's own logits after the whole prompt, without any state."""
    lm = load(path)
    logits = np.array(lm(mx.array([ids]), cache=empty_cache(lm)).logits[0, -1], np.float64)
    return float(logits[YES] - logits[NO])


def describe_reranker(model_dir: Path, **settings: Any) -> Path:
    """Add the files of sentence-transformers to a checkpoint. settings: of config_sentence_transformers.json."""
    kinds = {
        "": "sentence_transformers.base.modules.transformer.Transformer",
        "1_LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    }
    known = {"model_type": "CrossEncoder", "prompts": {"query": INSTRUCTION}, "default_prompt_name": "query"}
    files = {
        "modules.json": [{"idx": i, "name": str(i), "path": path, "type": kinds[path]} for i, path in enumerate(kinds)],
        "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO, "module_input_name": "causal_logits"},
        "config_sentence_transformers.json": {**known, **settings},
    }
    (model_dir / "1_LogitScore").mkdir(exist_ok=True)
    for name, content in files.items():
        (model_dir / name).write_text(json.dumps(content))
    return model_dir
