"""Server: runs `orchard serve`; starts Ray, Serve and the application, and ends them with the process."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from deployments.serve_run.checks import CannotStart
from deployments.serve_run.config_file import ConfigError, OrchardConfig, check_with_ray
from deployments.serve_run.head import Head
from deployments.serve_run.node_start import prepare_node, warm_agents
from deployments.serve_run.stop import GracefulStop, drain_applications, drain_this_node, say
from deployments.serve_run.watch import Watcher, application_status, children, end_ray, reason_in
from engine.errors import OrchardError

NAMESPACE = "serve"
"""Ray namespace in which Serve's own commands look for its controller."""

POLL_S = 0.1


class Server:
    """The process of `orchard serve`: starts Ray, or joins a cluster, and the application; shuts down on a signal."""

    def __init__(
        self,
        config: OrchardConfig,
        address: str | None,
        dashboard: bool,
        object_store_bytes: int,
        began_s: float,
        head: Head | None = None,
    ):
        """Store the settings; `run` starts the server.

        Args:
            config: The configuration file.
            address: Address of the Ray cluster to join; None: start a new one.
            dashboard: Whether a new cluster has Ray's dashboard.
            object_store_bytes: Shared memory of a new cluster.
            began_s: Monotonic start time of the command, for the log.
            head: This machine as the head of a cluster, at `address`.
        """
        self._config = config
        self._address = address
        self._dashboard = dashboard
        self._object_store_bytes = object_store_bytes
        self._began_s = began_s
        self._head = head
        self._stop = GracefulStop(self._drain)

    def run(self) -> int:
        """Serve until a signal; return the exit status. The watcher's thread may end the process with status 1."""
        try:
            self._start()
            while True:
                time.sleep(10)
        except KeyboardInterrupt:
            self._shut_down()
            return 0
        except Exception as error:
            say(f"Orchard could not be started:\n{_reason(error)}")
            self._shut_down()
            return 1

    def _start(self) -> None:
        """Start everything. The graph is imported while Ray's processes start, which takes about as long."""
        self._stop.install()
        if self._address is None:
            prepare_node()
        elif self._head is not None and sys.platform == "darwin":
            warm_agents()
        graph = _InThread(_import_graph)
        self._start_ray()
        self._stop.install()  # Ray has replaced the handler
        self._say("Ray is up")
        build_graph = graph.result()
        is_continued = self._head is not None and self._head.continues(identity_of(self._config))
        Watcher(self._config, self._on_running, owns_cluster=self._owns_ray, is_continued=is_continued).start()
        check_with_ray(self._config.raw, "the configuration")
        application = build_graph(self._config.args, self._config.overrides)
        self._say("the application is built")
        serve_is_up = _InThread(self._start_serve)  # waits for the proxies, which the replicas do not need
        self._await_controller(serve_is_up)
        self._deploy(application)
        self._say("the application is submitted")
        try:
            serve_is_up.result()
            self._say("the HTTP proxies are up")
        except (RayActorError, TimeoutError) as error:
            # Serve replaces a proxy that died; the watcher says that Orchard is ready only when one is healthy.
            self._say(f"an HTTP proxy is not up yet: {type(error).__name__}")

    def _start_ray(self) -> None:
        runtime_env = self._config.application.get("runtime_env")
        if self._head is not None:
            self._head.start()
            self._head.watch(self._end_at_once)
        if self._address is not None:
            ray.init(address=self._address, namespace=NAMESPACE, runtime_env=runtime_env)
            return
        ray.init(
            address="local",
            namespace=NAMESPACE,
            runtime_env=runtime_env,
            resources={"mlx": float(self._config.args.engines_here()), "mlx_scorer": 1.0},  # see autoscaling.py
            include_dashboard=self._dashboard,
            object_store_memory=self._object_store_bytes,
        )

    def _start_serve(self) -> None:
        from ray import serve

        raw = self._config.raw
        serve.start(
            proxy_location=raw.get("proxy_location"),
            http_options={"port": self._config.port, **self._config.http},
            logging_config=raw.get("logging_config"),
            tracing_config=raw.get("tracing_config"),
            controller_options=raw.get("controller_options"),
        )

    def _await_controller(self, serve_is_up: "_InThread") -> None:
        """Wait until Serve's controller exists, as a second one must not be started. Calls wait until it is up."""
        while not serve_is_up.is_done:
            actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
            if any(actor["namespace"] == NAMESPACE for actor in actors):
                return
            time.sleep(POLL_S)
        serve_is_up.result()

    def _deploy(self, application: Any) -> None:
        """Deploy the application, unless a head that is back finds the same one: its replicas elsewhere go on."""
        if self._head is None:
            self._submit(application)
            return
        identity = identity_of(self._config)
        if self._head.continues(identity) and application_status(self._config.name) is not None:
            self._say("the cluster has this application already: it goes on")
            self._head.note_deployed(identity)
            return
        self._head.refuse_two_changes(identity)
        self._submit(application)
        self._head.note_deployed(identity)

    def _submit(self, application: Any) -> None:
        from ray import serve

        target = serve.RunTarget(
            application,
            name=self._config.name,
            route_prefix=self._config.route_prefix,
            logging_config=self._config.application.get("logging_config") or self._config.raw.get("logging_config"),
        )
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False, blocking=False
        )

    def _on_running(self) -> None:
        self._stop.serving()
        self._say("the application runs")
        if self._head is not None:
            self._open_head(self._head)

    def _open_head(self, head: Head) -> None:
        """Let other machines join, from the watcher's thread."""
        try:
            head.answer_joins()
        except CannotStart as error:
            say(str(error))
            self._end_at_once()
        say(head.describe())

    @property
    def _owns_ray(self) -> bool:
        return self._address is None or self._head is not None

    def _drain(self) -> None:
        timeout_s = self._config.args.drain_timeout_s
        if self._head is not None and self._head.is_beside:
            return  # the engine and the answers of this machine are those of the member, which goes on
        if self._head is None:
            drain_applications({self._config.name: timeout_s})
        else:
            drain_this_node(self._config.name, timeout_s)

    def _end_at_once(self) -> None:
        """End the process from another thread, as the main thread may be blocked in Ray."""
        try:
            end_ray(children())
        finally:
            os._exit(1)

    def _shut_down(self) -> None:
        """Shut down Serve, and Ray if this process started it. A joined cluster keeps running, as with `serve run`.

        The application of a cluster stays, for the other machines and for the head's return.
        """
        if self._head is not None:
            ray.shutdown()
            self._head.stop()
            return
        if not ray.is_initialized():
            return
        from ray import serve

        serve.shutdown()
        ray.shutdown()

    def _say(self, what: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self._began_s:5.1f} s] {what}\n")
        sys.stderr.flush()


class _InThread:
    """A call in a daemon thread."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        """Wait for the call and return its result, or raise its exception."""
        while not self._done.wait(POLL_S):  # in slices, so that signal handlers run
            pass
        if self._error is not None:
            raise self._error
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._error = error
        self._done.set()


def _import_graph() -> Callable[..., Any]:
    from deployments.app import build_graph

    return build_graph


def identity_of(config: OrchardConfig) -> dict[str, Any]:
    """Return what makes two deployments of the application the same: its configuration, and the graph's options.

    Orchard's sources are not among it: each machine runs its own (deployments/calls/population.py). Ray must be
    initialized.
    """
    from deployments.app import describe_graph

    return {
        "name": config.name,
        "route_prefix": config.route_prefix,
        "args": config.args.model_dump(mode="json", exclude_unset=True),
        "overrides": config.overrides,
        "runtime_env": config.application.get("runtime_env"),
        "graph": describe_graph(config.args, config.overrides),
    }


def _reason(error: Exception) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    if isinstance(error, OrchardError | ConfigError):
        return str(error.args[0] if isinstance(error, OrchardError) else error)
    return f"{type(error).__name__}: {reason_in(str(error))}"
