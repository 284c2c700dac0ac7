"""The TCP ports of a cluster's machines, all of one range, for firewalls.

Besides these, Serve's replicas listen on ports that the system chooses.
"""

JOIN = 6378
"""On the head: `orchard join` and the members ask it."""
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
RELAY = 6387
"""On a member, for its own Ray: the way to the head's GCS."""
MEMBER = 6388
"""On a member: the other machines ask it which machine is the head."""
BESIDE = {
    "node-manager-port": 6390,
    "object-manager-port": 6391,
    "runtime-env-agent-port": 6392,
    "dashboard-agent-listen-port": 6393,
    "dashboard-agent-grpc-port": 6394,
    "metrics-export-port": 6395,
    "min-worker-port": 7000,
    "max-worker-port": 7099,
}
"""As NODE, for the head of a cluster on a machine that is also a member of it."""
HEAD_ONLY = {"ray-client-server-port": 6386, "dashboard-port": 8265}
"""Option of `ray start --head` to port; the dashboard listens on loopback."""
VARIABLES = {"AUTOSCALER_METRIC_PORT": 6376, "DASHBOARD_METRIC_PORT": 6377}
"""Environment variable of the head to port."""
