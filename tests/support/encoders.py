"""Tiny checkpoints of encoders, with a trained tokenizer, and their forward as transformers defines it, in float64."""

import json
from functools import cache
from itertools import pairwise
from math import erf
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.embedding_models import describe_embeddings

HIDDEN, INNER, HEADS, LAYERS, VOCAB, POSITIONS = 32, 64, 4, 4, 300, 100
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "hidden_act": "gelu", "max_position_embeddings": POSITIONS, "type_vocab_size": 2},
    **{
        family: {
            "model_type": family,
            "hidden_act": "gelu",
            "max_position_embeddings": POSITIONS + 2,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
        }
        for family in ("camembert", "roberta", "xlm-roberta")
    },
    "nomic_bert": {"model_type": "nomic_bert", "max_position_embeddings": POSITIONS, "type_vocab_size": 2},
    "modernbert": {
        "model_type": "modernbert",
        "max_position_embeddings": POSITIONS,
        "local_attention": 12,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "pad_token_id": 0,
    },
}
NAMES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
PREFIXES = {
    "bert": "bert.",
    "camembert": "roberta.",
    "modernbert": "model.",
    "nomic_bert": "nomic_bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
}
PUBLISHED_NOMIC = {
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": POSITIONS,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_positions": 4 * POSITIONS,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": VOCAB,
}
"""Fields of the published config.json of NomicBERT, which has no names of transformers."""
TEXTS = (
    "red apples and green pears grow in the garden behind the house",
    "a story about the sea, its ships and the people who sail them",
    "the capital of france is paris; the capital of italy is rome",
    "engines compute prompts in chunks, and encoders compute texts as a whole",
)


def config_of(family: str, is_classifier: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a family's config.json."""
    architecture = NAMES[family] + ("ForSequenceClassification" if is_classifier else "Model")
    labels = {"id2label": {"0": "LABEL_0"}} if is_classifier else {}
    return {"architectures": [architecture], **COMMON, **CONFIGS[family], **labels, **changes}


def make_encoder(out: Path, family: str, mode: str = "mean_tokens", **changes: Any) -> Path:
    """Write a checkpoint of an embedding model. mode: such as cls_token."""
    return describe_embeddings(_make(out, config_of(family, **changes)), mode, prompts={})


def make_cross_encoder(out: Path, family: str, **changes: Any) -> Path:
    """Write a checkpoint of a reranker."""
    return _make(out, config_of(family, is_classifier=True, **changes))


def _make(out: Path, config: dict[str, Any]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    weights = {name: mx.array(weight, mx.float32) for name, weight in weights_of(config).items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    tokenizer(config["model_type"]).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return out


def weights_of(config: dict[str, Any], seed: int = 5) -> dict[str, np.ndarray]:
    """Return random weights by the names of transformers' checkpoints."""
    family, rng = config["model_type"], np.random.default_rng(seed)
    is_classifier = config["architectures"][0].endswith("ForSequenceClassification")
    prefix = PREFIXES[family] if is_classifier or family == "modernbert" else ""
    head = _head_shapes(family) if is_classifier else {}
    shapes = {**{prefix + name: shape for name, shape in _shapes(config).items()}, **head}

    def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
        is_norm = "norm" in name.lower() and name.endswith("weight")
        return rng.normal(1.0 if is_norm else 0.0, 0.2 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1]), shape)

    return {name: weight(name, shape) for name, shape in shapes.items()}


def _linear(name: str, num_out: int, num_in: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if config["model_type"] == "modernbert":
        shapes |= {"embeddings.tok_embeddings.weight": (VOCAB, HIDDEN), "embeddings.norm.weight": (HIDDEN,)}
        for i in range(LAYERS):
            at = f"layers.{i}"
            shapes |= {} if i == 0 else {f"{at}.attn_norm.weight": (HIDDEN,)}
            shapes |= {f"{at}.attn.Wqkv.weight": (3 * HIDDEN, HIDDEN), f"{at}.attn.Wo.weight": (HIDDEN, HIDDEN)}
            shapes |= {f"{at}.mlp_norm.weight": (HIDDEN,), f"{at}.mlp.Wi.weight": (2 * INNER, HIDDEN)}
            shapes |= {f"{at}.mlp.Wo.weight": (HIDDEN, INNER)}
        return {**shapes, "final_norm.weight": (HIDDEN,)}
    if config["model_type"] == "nomic_bert":
        return _nomic_shapes(config)
    rows = {"word": VOCAB, "position": config["max_position_embeddings"], "token_type": config["type_vocab_size"]}
    shapes |= {f"embeddings.{name}_embeddings.weight": (number, HIDDEN) for name, number in rows.items()}
    shapes |= _norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{at}.attention.self.{name}", HIDDEN)
        shapes |= _linear(f"{at}.attention.output.dense", HIDDEN) | _norm(f"{at}.attention.output.LayerNorm")
        shapes |= _linear(f"{at}.intermediate.dense", INNER) | _linear(f"{at}.output.dense", HIDDEN, INNER)
        shapes |= _norm(f"{at}.output.LayerNorm")
    return shapes


def _nomic_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rows = {"word": VOCAB, "token_type": config["type_vocab_size"]}
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (number, HIDDEN) for name, number in rows.items() if number
    }
    shapes |= _norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        at = f"layers.{i}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= _norm(f"{at}.post_attention_layernorm") | _norm(f"{at}.post_mlp_layernorm")
    return shapes


def _head_shapes(family: str) -> dict[str, tuple[int, ...]]:
    if family == "bert":
        return _linear("bert.pooler.dense", HIDDEN) | _linear("classifier", 1)
    if family == "nomic_bert":
        return _linear("nomic_bert.pooler.dense", HIDDEN) | _linear("classifier", 1)
    if family != "modernbert":
        return _linear("classifier.dense", HIDDEN) | _linear("classifier.out_proj", 1)
    return {"head.dense.weight": (HIDDEN, HIDDEN), "head.norm.weight": (HIDDEN,)} | _linear("classifier", 1)


class Reference:
    """The forward of one text as transformers defines it. states: float64 [n, hidden]; score: a logit."""

    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_text())
        weights: Any = mx.load(str(path / "model.safetensors"))
        self.weights = {name: np.array(weight, np.float64) for name, weight in weights.items()}
        prefix = PREFIXES[self.config["model_type"]]
        self.weights |= {name.removeprefix(prefix): weight for name, weight in self.weights.items()}

    def states(self, ids: list[int], start: int | None = None) -> np.ndarray:
        if self.config["model_type"] == "modernbert":
            return self._modern(ids)
        if self.config["model_type"] == "nomic_bert":
            return self._nomic(ids, len(ids) if start is None else start)
        return self._bert(ids, len(ids) if start is None else start)

    def score(self, ids: list[int], start: int | None = None) -> float:
        states, family = self.states(ids, start), self.config["model_type"]
        if family == "modernbert":
            is_mean = self.config.get("classifier_pooling") == "mean"
            hidden = _gelu((states.mean(axis=0) if is_mean else states[0]) @ self.weights["head.dense.weight"].T)
            return float(self._linear(self._norm(hidden, "head.norm", 1e-5), "classifier")[0])
        has_pooler = family in ("bert", "nomic_bert")
        dense, out = ("pooler.dense", "classifier") if has_pooler else ("classifier.dense", "classifier.out_proj")
        return float(self._linear(np.tanh(self._linear(states[0], dense)), out)[0])

    def _bert(self, ids: list[int], start: int) -> np.ndarray:
        weights, num, eps = self.weights, len(ids), self.config.get("layer_norm_eps", 1e-12)
        is_bert = self.config["model_type"] == "bert"
        pad = self.config.get("pad_token_id", 1)
        own = [i for i in range(num) if ids[i] != pad]
        places = (
            np.arange(num) if is_bert else np.array([pad + own.index(i) + 1 if i in own else pad for i in range(num)])
        )
        types = (np.arange(num) >= start).astype(int) if is_bert else np.zeros(num, int)
        parts = zip(("word", "position", "token_type"), (ids, places, types), strict=True)
        x = sum(weights[f"embeddings.{name}_embeddings.weight"][index] for name, index in parts)
        x = self._norm(x, "embeddings.LayerNorm", eps)
        for i in range(LAYERS):
            at = f"encoder.layer.{i}"
            q, k, v = (self._linear(x, f"{at}.attention.self.{name}") for name in ("query", "key", "value"))
            mixed = self._linear(_attend(*map(_heads, (q, k, v))), f"{at}.attention.output.dense")
            x = self._norm(x + mixed, f"{at}.attention.output.LayerNorm", eps)
            inner = _gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm", eps)
        return x

    def _modern(self, ids: list[int]) -> np.ndarray:
        x = self._norm(self.weights["embeddings.tok_embeddings.weight"][ids], "embeddings.norm", 1e-5)
        distance = np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids)))
        for i in range(LAYERS):
            at, is_local = f"layers.{i}", i % 3 != 0
            before = x if i == 0 else self._norm(x, f"{at}.attn_norm", 1e-5)
            q, k, v = np.split(before @ self.weights[f"{at}.attn.Wqkv.weight"].T, 3, axis=-1)
            base = self.config["local_rope_theta" if is_local else "global_rope_theta"]
            hides = distance > self.config["local_attention"] // 2 if is_local else None
            mixed = _attend(_rotated(_heads(q), base), _rotated(_heads(k), base), _heads(v), hides)
            x = x + mixed @ self.weights[f"{at}.attn.Wo.weight"].T
            value, gate = np.split(self._norm(x, f"{at}.mlp_norm", 1e-5) @ self.weights[f"{at}.mlp.Wi.weight"].T, 2, -1)
            x = x + (_gelu(value) * gate) @ self.weights[f"{at}.mlp.Wo.weight"].T
        return self._norm(x, "final_norm", 1e-5)

    def _nomic(self, ids: list[int], start: int) -> np.ndarray:
        weights, num, size, config = self.weights, len(ids), HIDDEN // HEADS, self.config
        eps, rope = config.get("layer_norm_eps", 1e-12), config.get("rope_parameters", {})
        trained, base = config["max_position_embeddings"], rope.get("rope_theta", 1000.0)
        if rope.get("rope_type") == "dynamic":
            factor = rope["factor"]
            base *= (factor * max(num, trained) / trained - (factor - 1)) ** (size / (size - 2))
        x = weights["embeddings.word_embeddings.weight"][ids]
        if config["type_vocab_size"]:
            types = (np.arange(num) >= start).astype(int) if config["type_vocab_size"] > 1 else np.zeros(num, int)
            x = x + weights["embeddings.token_type_embeddings.weight"][types]
        x = self._norm(x, "embeddings.LayerNorm", eps)
        for i in range(LAYERS):
            at = f"layers.{i}"
            q, k, v = (_heads(x @ weights[f"{at}.self_attn.{name}_proj.weight"].T) for name in "qkv")
            mixed = _attend(_rotated(q, base), _rotated(k, base), v) @ weights[f"{at}.self_attn.o_proj.weight"].T
            x = self._norm(x + mixed, f"{at}.post_attention_layernorm", eps)
            gate, up = (x @ weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            inner = (gate / (1 + np.exp(-gate)) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
            x = self._norm(x + inner, f"{at}.post_mlp_layernorm", eps)
        return x

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: Any, name: str, eps: float) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def _heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, hides: np.ndarray | None = None) -> np.ndarray:
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    scores = np.exp(scores if hides is None else np.where(hides, -np.inf, scores))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(0, 1).reshape(q.shape[1], -1)


def _rotated(x: np.ndarray, base: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / base ** (np.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    turned = one * np.cos(angle) - other * np.sin(angle), other * np.cos(angle) + one * np.sin(angle)
    return np.concatenate(turned, axis=-1)


@cache
def tokenizer(family: str) -> Tokenizer:
    """Return a tokenizer of the family's kind: WordPiece, Unigram, or BPE of bytes. Its ids are below VOCAB."""
    roberta = ["<s>", "<pad>", "</s>", "<unk>"]
    special = {
        "camembert": ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"],
        "roberta": roberta,
        "xlm-roberta": roberta,
    }
    tokens = special.get(family, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    if family in ("bert", "nomic_bert"):
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=tokens, show_progress=False)
    elif family in ("camembert", "xlm-roberta"):
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCAB, special_tokens=tokens, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator([*TEXTS, *(" ".join(pair) for pair in pairwise(TEXTS))], trainer)
    begin, end = ("<s>", "</s>") if family in special else ("[CLS]", "[SEP]")
    pair = f"{begin} $A {end} {end} $B {end}" if family in special else f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1"
    known = [(token, made.token_to_id(token)) for token in (begin, end)]
    made.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", pair, known)
    return made
