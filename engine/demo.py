"""The location of the demo model, and whether another model has its tokenizer."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo_model"


def has_tokenizer_of_demo(model: str) -> bool:
    """Return whether a model's tokenizer file equals the demo model's; False if it is not on this machine."""
    if model == "demo":
        return True
    try:
        theirs = (Path(model).expanduser() / "tokenizer.json").read_bytes()
    except OSError:
        return False
    return theirs == (DEMO_MODEL / "tokenizer.json").read_bytes()
