"""The TCP ports of a cluster's machines, all of one range, for firewalls.

Besides these, Serve's replicas listen on ports that the system chooses.
"""

JOIN = 6378
"""On the head: `orchard join` asks it."""
GCS = 6379
"""On the head: Ray's GCS, whose address is that of the cluster."""
NODE = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-listen-port": 6383,
    "dashboard-agent-grpc-port": 6384,
    "metrics-export-port": 6385,
    "min-worker-port": 6400,
    "max-worker-port": 6999,
}
"""Option of `ray start` to port, on every machine."""
HEAD_ONLY = {"ray-client-server-port": 6386, "dashboard-port": 8265}
"""Option of `ray start --head` to port; the dashboard listens on loopback."""
VARIABLES = {"AUTOSCALER_METRIC_PORT": 6387, "DASHBOARD_METRIC_PORT": 6388}
"""Environment variable of the head to port."""
