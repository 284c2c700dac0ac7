"""Values of the Retry-After header in seconds: fixed ones for refusals without a predicted wait, and their bounds.

Predicted waits come from `PromptQueue.expected_wait_s` (a full queue), `Pace.seconds_until` (a full server) and
`TokenBucket.seconds_until` (a client's allowance).
"""

MIN_S, MAX_S = 1.0, 60.0
"""Bounds: the header has whole seconds, and the SDKs of OpenAI and Anthropic ignore values over a minute and retry
within about a second."""

STEP_FAILED_S = 1.0
"""A step of the engine failed or ran out of memory, and the engine goes on."""

SCORER_BUSY_S = 1.0
"""The scorer has as many prompts as it accepts; each takes about a second."""

BODY_S = 1.0
"""The limits of arriving bodies are reached, or the process that parsed a body was lost. Bodies complete quickly."""

PROCESS_LOST_S = 1.0
"""The ingress that handled a request was lost, and another one may be running."""

IMAGE_WORKER_S = 2.0
"""No process that decodes images can be started."""

ENGINE_S = 2.0
"""The engine's queue is full before it has measured a wait, or the machine is short of memory."""

REPLICA_LOST_S = 5.0
"""A replica is lost or does not answer in time: it restarts within seconds at best."""

NOT_READY_S = 5.0
"""No engine is ready, or the server is starting: loading weights takes seconds at best."""

REPLACED_S = 5.0
"""A deployment is being replaced, and its replicas serve different checkpoints."""

STOPPED_S = 5.0
"""The server stops: a restart takes at least this long."""
