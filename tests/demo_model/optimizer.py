"""The optimizer: Muon for the matrices of the layers, AdamW for everything else."""

import math

import mlx.core as mx
import mlx.optimizers as optim

MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
MIN_SIDE = 64
"""Matrices with a shorter side are left to AdamW."""
NEWTON_SCHULZ_STEPS = 5


def make_optimizer() -> optim.MultiOptimizer:
    """Return an optimizer whose learning rate is set before each step."""
    adam = optim.AdamW(0.0, betas=[0.9, 0.98], eps=1e-10, weight_decay=0.0, bias_correction=True)
    return optim.MultiOptimizer([Muon(), adam], [is_for_muon])


def is_for_muon(name: str, parameter: mx.array) -> bool:
    """Return whether a parameter is a matrix between hidden states."""
    return parameter.ndim == 2 and min(parameter.shape) >= MIN_SIDE and "embed" not in name


class Muon(optim.Optimizer):
    """Steps by the orthogonalized momentum, as large as those of Adam, with decoupled weight decay.

    Source: https://kellerjordan.github.io/posts/muon/, with the scale of Liu et al. 2025, arXiv 2502.16982.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", 0.0)

    def init_single(self, parameter: mx.array, state: dict) -> None:
        state["momentum"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        state["momentum"] = momentum = MOMENTUM * state["momentum"] + (1 - MOMENTUM) * gradient
        update = orthogonalize((1 - MOMENTUM) * gradient + MOMENTUM * momentum)
        rate, scale = self.learning_rate, 0.2 * math.sqrt(max(parameter.shape))
        return parameter * (1 - rate * WEIGHT_DECAY) - rate * scale * update


def orthogonalize(matrix: mx.array) -> mx.array:
    """Return a matrix [n, m] with about the same singular vectors, and all singular values near 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (mx.linalg.norm(x) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.T if is_tall else x
