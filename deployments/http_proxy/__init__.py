"""Orchard's middleware for Serve's HTTP proxies, installed through Serve's hook."""

import os

HOOK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Variable that names a function that Serve calls in each proxy; serve_run/environment.py sets it by default."""

CALLBACK = "deployments.http_proxy.guard:middlewares"


def is_guarded() -> bool:
    """Tell whether the cluster's proxies run Orchard's middleware, judging by the environment of this process."""
    return os.environ.get(HOOK) == CALLBACK
