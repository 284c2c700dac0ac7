"""Ray reads its environment when it is imported: what `serve` and `ray` get when they start, the tests get here.

With several processes of tests (pytest -n) each computes on one core: products that wait for a thread which another
process keeps from running take ten times as long. Run alone, tests compute with as many threads as a server.
"""

import os

from deployments.serve_run.environment import set_defaults

set_defaults()
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["tests.support.demo_model"]
