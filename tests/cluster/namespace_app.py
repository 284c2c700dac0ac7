"""Deploys Orchard on the Ray cluster of this machine's node, as the namespaces of test_partition.py are; says when it
runs on so many nodes, and stays until its stdin is closed.

Usage: python -m tests.cluster.namespace_app ADDRESS NUM_NODES PORT API_KEYS_FILE
"""

import sys
import warnings

with warnings.catch_warnings():  # see tests/deployments/conftest.py
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`", category=DeprecationWarning)
    import ray
    from ray import serve

from ray.serve._private.common import ReplicaState
from ray.serve.config import HTTPOptions

from deployments.app import AppArgs, build_app
from tests.cluster.conftest import APP, DEPLOYMENTS, wait_until

START_TIMEOUT_S = 240.0


def main(address: str, num_nodes: int, port: int, api_keys_file: str) -> None:
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    # All addresses of the namespace, which nothing but the other namespaces reaches.
    serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host="0.0.0.0", port=port))
    args = AppArgs.model_validate({"http": {"api_keys_file": api_keys_file}})
    serve.run(build_app(args), name=APP, route_prefix="/", blocking=False)

    def is_running() -> bool:
        status = serve.status()
        deployed = status.applications[APP].deployments
        num_running = [deployed[name].replica_states.get(ReplicaState.RUNNING, 0) for name in DEPLOYMENTS]
        proxies = [state.value for state in status.proxies.values()]
        return num_running == [num_nodes] * len(DEPLOYMENTS) and proxies == ["HEALTHY"] * num_nodes

    wait_until(is_running, START_TIMEOUT_S, lambda: f"{serve.status()}")
    sys.stdout.write("Orchard runs\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
