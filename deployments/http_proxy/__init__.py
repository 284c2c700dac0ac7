"""What Orchard adds to Serve's HTTP proxy, through Serve's hook for middleware."""

import os

HOOK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Serve calls the function that this variable names in each proxy; set by launch.py, an operator's value wins."""

CALLBACK = "deployments.http_proxy.guard:middlewares"


def is_guarded() -> bool:
    """Whether the proxies of this cluster, whose environment all processes share, have Orchard's middleware."""
    return os.environ.get(HOOK) == CALLBACK
