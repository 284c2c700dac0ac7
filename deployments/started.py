"""Which deployments have had a running replica, as the autoscaling policies of one controller process tell each other.

Serve gives a policy the figures of its own deployment only. It also pickles the module of a policy by value, so that
every policy has copies of that module's classes and variables: what they share must lie in another module.
"""

STARTED: set[tuple[str, str]] = set()
"""(application, deployment) pairs."""
