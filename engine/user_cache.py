"""Where Orchard keeps what can be made again: copies of libraries, measurements."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which need not exist; XDG_CACHE_HOME moves it as it does for other programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard"
