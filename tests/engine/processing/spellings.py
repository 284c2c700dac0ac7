"""The spellings of JSON values of which the server promises one, and the exact reading of JSON."""

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice, permutations, product
from typing import Any

MAX_SPELLINGS = 2000
"""Most spellings of a value: enough for all orders of six properties, or of five in two objects."""


def exact(text: str) -> Any:
    """Parse JSON with its decimals as they are, but for exponents that no Decimal has: these become 9999 or -9999."""
    return json.loads(text, parse_float=_decimal)


def _decimal(text: str) -> Decimal:
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent.lstrip("+-0")) > 9:
        exponent = "-9999" if exponent.startswith("-") else "9999"
    return Decimal(f"{mantissa}e{exponent or 0}")


def spellings(value: Any) -> Iterator[str]:
    """Yield a value as JSON with its properties in each order; the server promises one of them."""
    if isinstance(value, dict):
        orders = permutations(value)
        found = (
            "{" + ", ".join(f"{_text(name)}: {part}" for name, part in zip(order, parts, strict=True)) + "}"
            for order in orders
            for parts in product(*(list(islice(spellings(value[name]), 24)) for name in order))
        )
        yield from islice(found, MAX_SPELLINGS)
    elif isinstance(value, list):
        parts = [list(islice(spellings(item), 120)) for item in value]
        yield from islice(("[" + ", ".join(items) + "]" for items in product(*parts)), MAX_SPELLINGS)
    elif isinstance(value, str):
        yield _text(value)
    elif isinstance(value, float | Decimal):
        number = Decimal(str(value))
        yield str(int(number)) if number == int(number) else format(number.normalize(), "f")
    else:
        yield json.dumps(value)


def _text(value: str) -> str:
    is_whole = value.encode(errors="replace").decode() == value
    return json.dumps(value, ensure_ascii=not is_whole).replace("\x7f", "\\u007f")


def dump(value: Any) -> str:
    """Return a schema with decimals as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {dump(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(dump, value))}]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)
