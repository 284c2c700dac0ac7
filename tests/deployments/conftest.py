"""Ray Serve 2.60 declares a pydantic field in a way that pydantic 2 warns about, once, when it is first imported."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`", category=DeprecationWarning)
    import ray.serve  # noqa: F401
