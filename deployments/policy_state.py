"""The deployments that have had a running replica, shared by the autoscaling policies of one controller process.

Serve shows a policy only its own deployment. It also pickles a policy's module by value, so every policy has its own
copy of that module's variables; shared state must be in another module, this one.
"""

STARTED: set[tuple[str, str]] = set()
"""(application, deployment) pairs."""
