"""Parameters of a test of which the gate runs some and the night all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some_at_night(values: Iterable[Any], gate: Container[Any], reason: str) -> list[Any]:
    """Return the parameters of a test; those that are not in `gate` have the mark `night` with the reason.

    A list or tuple `gate` must name parameters that exist: one that was renamed would leave the gate unseen.
    """
    values, mark = list(values), pytest.mark.night(reason)
    unknown = [one for one in gate if one not in values] if isinstance(gate, (list, tuple)) else []
    assert not unknown, f"no parameters: {unknown}"
    return [value if value in gate else pytest.param(value, marks=mark) for value in values]
