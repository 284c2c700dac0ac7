"""The keys that serve_config.yaml may have outside `args`, and why others may not be set.

The tables repeat the field names of Ray's schemas; tests/deployments/serve_run/test_config_file.py compares them.
"""

from collections.abc import Mapping

DEPLOYMENTS = ("Ingress", "TextMTP", "MLLM", "ModelReplica", "SpecPrefillScorer")
PLANNERS = ("TextMTP", "MLLM")

Reasons = Mapping[str, str | None]
"""Key to the reason why it may not be set; None: it may be set."""

_FROM_CLUSTER = "follows from the cluster: one replica per node that offers `mlx` (or `mlx_scorer`)"
_FROM_NODES = "is derived from the nodes: Orchard places its replicas itself"
_FROM_DRAIN = "is derived from args.drain_timeout_s"

TOP_KEYS: Reasons = {
    "proxy_location": None,
    "http_options": None,
    "grpc_options": "has no effect: Orchard serves only HTTP",
    "controller_options": None,
    "logging_config": None,
    "tracing_config": None,
    "applications": None,
    "target_capacity": f"the number of replicas {_FROM_CLUSTER}",
}
HTTP_KEYS: Reasons = {
    "host": None,
    "port": None,
    "root_path": None,
    "request_timeout_s": "it would also abort answers that stream normally; the limits of requests are in args",
    "keep_alive_timeout_s": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_keyfile_password": None,
    "ssl_ca_certs": None,
}
APPLICATION_KEYS: Reasons = {
    "name": None,
    "route_prefix": None,
    "import_path": None,
    "runtime_env": None,
    "host": "belongs to the section http_options",
    "port": "belongs to the section http_options",
    "deployments": None,
    "autoscaling_policy": f"the number of replicas {_FROM_CLUSTER}",
    "args": None,
    "logging_config": None,
    "external_scaler_enabled": f"the number of replicas {_FROM_CLUSTER}",
}
DEPLOYMENT_KEYS: Reasons = {
    "name": None,
    "num_replicas": f"the number of replicas {_FROM_CLUSTER}",
    "max_ongoing_requests": None,  # only of PLANNERS
    "max_queued_requests": "Serve must not refuse requests: the ingress limits them with args.engine.max_queue",
    "backpressure_config": "has no effect: Serve refuses no requests",
    "user_config": "has no effect: settings are in args",
    "autoscaling_config": f"the number of replicas {_FROM_CLUSTER}",
    "graceful_shutdown_wait_loop_s": _FROM_DRAIN,
    "graceful_shutdown_timeout_s": _FROM_DRAIN,
    "health_check_period_s": None,
    "health_check_timeout_s": None,
    "ray_actor_options": _FROM_NODES,
    "placement_group_bundles": _FROM_NODES,
    "placement_group_strategy": _FROM_NODES,
    "placement_group_bundle_label_selector": _FROM_NODES,
    "max_replicas_per_node": _FROM_NODES,
    "logging_config": None,
    "request_router_config": "is derived: requests go to the engine whose node prepares them",
    "gang_scheduling_config": _FROM_NODES,
    "deployment_actors": "has no effect: Orchard has no deployment actors",
    "rolling_update_percentage": None,
    "max_surge_percent": "has no effect: a second engine does not fit on a node",
}
LOGGING_KEYS: Reasons = dict.fromkeys(
    ("encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs")
)
