"""The host waits for earlier layers of a long forward, and computes the same."""

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest

from engine.worker.run_ahead import LAYERS, MIN_TOKENS, RunAhead, of_several_prompts

NUM_LAYERS = 4 * LAYERS


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def __call__(self, x: mx.array) -> tuple[mx.array, None]:
        return x + self.proj(x), None


@pytest.fixture
def layers() -> list[Layer]:
    mx.random.seed(0)
    return [Layer() for _ in range(NUM_LAYERS)]


def forward(layers: list[Layer], num_tokens: int) -> mx.array:
    x = mx.random.normal((2, num_tokens, 8), key=mx.random.key(1))
    for layer in layers:
        x, _ = layer(x)
    return x


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, mx.array]]:
    """The arrays whose computation was begun, and those that were waited for."""
    called = list[tuple[str, mx.array]]()
    for name in ("async_eval", "eval"):
        own = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda x, own=own, name=name: (called.append((name, x)), own(x)))
    return called


def test_a_forward_waits_for_the_layers_before_those_that_were_enqueued_last(layers, calls):
    expected = forward(layers, MIN_TOKENS)
    mx.eval(expected)
    calls.clear()
    run_ahead = RunAhead(layers)
    for _ in range(2):  # nothing of a forward is left for the next one
        found = forward(layers, MIN_TOKENS)
        assert [name for name, _ in calls] == ["async_eval", "async_eval", "eval", "async_eval", "eval"]
        begun = [x for name, x in calls if name == "async_eval"]
        assert all(one is other for one, other in zip([x for name, x in calls if name == "eval"], begun, strict=False))
        assert run_ahead._computing is None
        calls.clear()
        assert mx.array_equal(found, expected)
        calls.clear()


def test_a_decode_step_never_waits(layers, calls):
    RunAhead(layers)
    forward(layers, MIN_TOKENS - 1)
    assert not calls


def test_a_forward_of_several_short_prompts_waits_as_one_of_a_long_prompt_does(layers, calls):
    RunAhead(layers)
    with of_several_prompts():
        forward(layers, MIN_TOKENS // 2)  # of two rows
    assert [name for name, _ in calls].count("eval") == 2
    calls.clear()
    forward(layers, MIN_TOKENS // 2)
    assert not calls


def test_layers_keep_the_names_of_their_weights_and_of_their_class(layers):
    names = [name for layer in layers for name in layer.parameters()]
    RunAhead(layers)
    assert [name for layer in layers for name in layer.parameters()] == names
    assert {type(layer).__name__ for layer in layers} == {"Layer"} and all(isinstance(one, Layer) for one in layers)
