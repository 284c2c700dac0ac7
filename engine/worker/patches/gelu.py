"""The GELU of Gemma 1, StarCoder2, GPT-NeoX and GPT-BigCode.

mlx_vlm 0.7.10 computes Gemma 1 and StarCoder2 with the exact GELU, where their checkpoints name its tanh approximation,
and reads no activation for the other two: GPT-NeoX gets the approximation, where Pythia names the exact one, and
GPT-BigCode the exact one. It can be removed when the library's modules compute what config.json names.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import BaseModelConfig
from mlx_vlm.models.gemma.language import MLP as GemmaMLP
from mlx_vlm.models.gpt_bigcode.config import ModelConfig as GPTBigCodeConfig
from mlx_vlm.models.gpt_bigcode.language import MLP as GPTBigCodeMLP
from mlx_vlm.models.gpt_neox.config import ModelConfig as GPTNeoXConfig
from mlx_vlm.models.gpt_neox.language import MLP as GPTNeoXMLP
from mlx_vlm.models.starcoder2.language import MLP as StarCoder2MLP

GELUS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), nn.gelu_approx),
}
READ: dict[Any, tuple[str, str]] = {
    GPTNeoXConfig: ("hidden_act", "gelu"),
    GPTBigCodeConfig: ("activation_function", "gelu_pytorch_tanh"),
}
"""The field that a family reads, and transformers' default."""

LIBRARY: dict[Any, tuple[Any, Any]] = {
    mlp: (mlp.__init__, mlp.__call__) for mlp in (GemmaMLP, GPTBigCodeMLP, GPTNeoXMLP, StarCoder2MLP)
}
"""The library's methods, by class."""


def _from_dict(cls: Any, params: dict[str, Any]) -> Any:
    name, default = READ[cls]
    made = BaseModelConfig.from_dict.__func__(cls, params)  # type: ignore[attr-defined]
    setattr(made, name, params.get(name) or default)
    return made


def _reading_init(mlp: Any, config: Any) -> Any:
    library_init, (name, default) = LIBRARY[mlp][0], READ[config]

    def init(self: Any, args: Any) -> None:
        library_init(self, args)
        act = getattr(args, name, default)
        if act not in GELUS:
            raise ValueError(f"config.json has {name} {act!r}; expected one of {', '.join(GELUS)}")
        self.gelu = GELUS[act]

    return init


def _gemma(self: Any, x: mx.array) -> mx.array:
    return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


def _starcoder2(self: Any, x: mx.array) -> mx.array:
    return self.c_proj(nn.gelu_approx(self.c_fc(x)))


def _gpt_neox(self: Any, x: mx.array) -> mx.array:
    return self.dense_4h_to_h(self.gelu(self.dense_h_to_4h(x)))


def _gpt_bigcode(self: Any, x: mx.array) -> mx.array:
    return self.c_proj(self.gelu(self.c_fc(x)))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for config in READ:
        config.from_dict = classmethod(_from_dict)
    GPTNeoXMLP.__init__ = _reading_init(GPTNeoXMLP, GPTNeoXConfig)
    GPTBigCodeMLP.__init__ = _reading_init(GPTBigCodeMLP, GPTBigCodeConfig)
    for mlp, method in {
        GemmaMLP: _gemma,
        StarCoder2MLP: _starcoder2,
        GPTNeoXMLP: _gpt_neox,
        GPTBigCodeMLP: _gpt_bigcode,
    }.items():
        mlp.__call__ = method
