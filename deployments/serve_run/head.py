"""Head: this machine as the head of a cluster, for `orchard serve --cluster`: the GCS's store, and Ray on it.

The state of Ray's GCS, and with it the application, is in a file. When this machine dies and the command is given
again, the other machines, which wait for RECONNECT_S, belong to the same cluster as before and have not stopped.
"""

import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from deployments.args import AppArgs
from deployments.cluster import ports
from deployments.cluster.facts import read_facts
from deployments.cluster.folder import HEAD_LOCK, ClusterFolder, FolderError
from deployments.cluster.head_service import HeadService
from deployments.cluster.headship import FIRST_TERM, Headship, write_headship
from deployments.cluster.join_server import JoinServer
from deployments.cluster.join_token import read_join_token
from deployments.cluster.log_copy import age_text
from deployments.cluster.membership import read_membership
from deployments.cluster.model_files import ModelSource
from deployments.cluster.own_address import NoAddress, own_address
from deployments.cluster.ray_node import (
    RECONNECT_S,
    NodeOptions,
    RayFailed,
    RayNode,
    contradiction_in,
    set_variables,
)
from deployments.cluster.sources import package_versions, sources_digest
from deployments.cluster.store_process import StoreNotStarted, StoreProcess
from deployments.serve_run.adoption import find_adoption, refuse_if_adopted, take_over, tell_replaced
from deployments.serve_run.checks import CannotStart, address_note
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.effective import url_of
from deployments.serve_run.environment import raise_open_files, set_defaults
from deployments.serve_run.head_secrets import (
    forget_old_secrets,
    guest_secret,
    head_secrets,
    refuse_other_tls,
)
from deployments.serve_run.stop import say
from engine.config import OWN_HEAD
from engine.process_lock import LockHeld, ProcessLock
from engine.processing.checkpoint import checkpoint_here, heads_beside

LEFTOVER_S = 30.0
"""Time for the processes of an earlier start, which end by themselves, to do so."""
POLL_S = 0.5
CONNECT_S = 1.0
TELL_EVERY_S = 5.0
BESIDE_STORE_BYTES = 100 * 2**20
"""Shared memory of a head that only leads; Ray's smallest is 75 MiB."""

SERVE_KEYS = ("http_options", "proxy_location", "logging_config", "tracing_config", "controller_options")
"""Entries of the configuration that Serve reads once, when its controller is first started."""


@dataclass(frozen=True)
class HeadOptions:
    """What the command line says of the head."""

    interface: str | None = None
    """Name or address of the interface by which the others reach this machine; None: that of the default route."""
    is_new: bool = False
    """Whether a new cluster replaces the one in the log."""
    adopts: bool = False
    """Whether this machine takes over the cluster that it is a member of."""
    is_forced: bool = False
    """Whether an old copy of the log is good enough for that."""
    has_tls: bool = True
    """Whether the traffic between the machines is encrypted."""


class Head:
    """The store and Ray on this machine. `start` starts both, `stop` ends both.

    Attributes:
        address: HOST:PORT of the GCS, for `ray.init`.
        is_beside: Whether a member's Ray runs on this machine, which has the engine, so that this head only leads.
    """

    def __init__(
        self,
        config: OrchardConfig,
        options: HeadOptions,
        dashboard: bool,
        object_store_bytes: int,
        folder: ClusterFolder | None = None,
    ):
        """Check that this machine can be the head, and reserve that.

        Raises:
            CannotStart: Another process is the head, a port is in use, or the cluster in the log differs in what cannot
                be changed.
        """
        self._config = config
        self._folder = folder or ClusterFolder()
        self._store: StoreProcess | None = None
        self._ray: RayNode | None = None
        self._joins: JoinServer | None = None
        self._service: HeadService | None = None
        self._is_stopping = threading.Event()
        self._dashboard = dashboard
        self._object_store_bytes = object_store_bytes
        try:
            self._folder.make()
            self._lock = ProcessLock(self._folder.path / HEAD_LOCK)
        except LockHeld as held:
            raise CannotStart(f"this machine is already the head of a cluster, by {held.holder}") from None
        except FolderError as error:
            raise CannotStart(str(error)) from None
        try:
            self._reserve(options)
        except (FolderError, NoAddress) as error:
            self._lock.release()
            raise CannotStart(str(error)) from None
        except CannotStart:
            self._lock.release()
            raise
        tls_files = self._folder.tls if options.has_tls else None
        set_variables(os.environ, self._folder.token_file, tls_files)  # before this process imports Ray

    def _reserve(self, options: HeadOptions) -> None:
        """Check everything, then take the cluster over if that is asked for. Raises CannotStart, FolderError."""
        if (reason := contradiction_in(os.environ)) is not None:
            raise CannotStart(f"{reason}.")
        if options.is_new:
            self._folder.forget_cluster()
        member = read_membership(self._folder)
        if member is None and not options.adopts:
            forget_old_secrets(self._folder, options.is_new)
        self.is_beside = member is not None and member.is_running
        adoption = find_adoption(self._folder, options.is_forced) if options.adopts else None
        if adoption is not None:
            self._host, self._started = adoption.own_address, adoption.started
            refuse_other_tls(self._folder, self._started, options.has_tls)
            self._secrets = head_secrets(self._folder, self._host, options.has_tls)
        else:
            self._host, self._started = own_address(options.interface), self._folder.started()
            if self.is_beside and not self._started:
                raise CannotStart(
                    f"this machine belongs to the cluster of {member.head if member else ''}: run `orchard leave` "
                    "first. If that head is gone for good, --adopt takes its cluster over."
                )
            self._refuse_other_address()
            refuse_other_tls(self._folder, self._started, options.has_tls)
            self._secrets = head_secrets(self._folder, self._host, options.has_tls)
            if self._started:
                refuse_if_adopted(self._folder, self.headship)
        self.address = f"{self._host}:{ports.GCS}"
        self._refuse_other_versions()
        self._refuse_other_serve_options()
        numbers = ports.BESIDE if self.is_beside else ports.NODE
        await_free(self._host, (ports.GCS, numbers["node-manager-port"]))
        if adoption is not None:
            take_over(self._folder, adoption)
            say(
                f"This machine takes over the cluster of {adoption.old.address}, whose log was copied "
                f"{age_text(adoption.copied_s)}. The other machines follow within seconds. After this, the same "
                "cluster goes on here by `orchard serve --cluster`, with the same MODEL or --config"
                f"{f' {self._config.path}' if Path(self._config.path).is_file() else ''}."
            )

    @property
    def headship(self) -> Headship:
        """Headship of this machine."""
        return Headship(self._host, int(self._started.get("term", FIRST_TERM)))

    def start(self) -> None:
        """Start the store and Ray. Raises CannotStart."""
        raise_open_files()
        address_note().unlink(missing_ok=True)  # of an earlier start, which Ray would take for a running one
        try:
            self._store = StoreProcess(self._folder.store_log)
            environ = {**os.environ, "RAY_REDIS_ADDRESS": self._store.address}
            set_defaults(environ, "ray")
            self._ray = RayNode(self._node_options(self._store), environ, self._ray_output)
            self._ray.start()
            self._note(self._started.get("application"), self._started.get("sources"))
            write_headship(self._folder, self.headship)
        except (StoreNotStarted, RayFailed, FolderError) as error:
            self.stop()
            raise CannotStart(str(error)) from None
        except BaseException:
            self.stop()
            raise

    def _node_options(self, store: StoreProcess) -> NodeOptions:
        return NodeOptions(
            self._host,
            {} if self.is_beside else self._resources,
            BESIDE_STORE_BYTES if self.is_beside else self._object_store_bytes,
            dashboard=self._dashboard,
            is_beside=self.is_beside,
            secret_options=(f"--redis-password={store.password}",),
        )

    @property
    def _ray_output(self) -> Path:
        output = self._folder.ray_output
        return output.with_name("ray-head.log") if self.is_beside else output

    def answer_joins(self) -> None:
        """Answer machines that want to join, from now on. Raises CannotStart."""
        try:
            self._service = HeadService(
                self._folder, self.headship, self._started["id"], self._shared, self._on_adopted
            )
            self._joins = JoinServer(
                self._host,
                ports.JOIN,
                self._secrets.token,
                self._facts,
                {**self._service.answers(), **ModelSource(self._models).answers()},
                self._secrets.tls,
                self._secrets.authority,
                partial(guest_secret, self._folder),
            )
        except OSError as error:
            raise CannotStart(
                f"port {ports.JOIN} of {self._host}, which answers `orchard join`, cannot be used: {error.strerror}"
            ) from None
        self._joins.start()

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call on_end from a thread, after a message, when the store or Ray has ended by itself."""

        def look() -> None:
            while not self._is_stopping.wait(POLL_S):
                if (what := self._ended()) is not None:
                    say(
                        f"{what} of this head has ended. The other machines go on answering for {RECONNECT_S} s: "
                        "give the command again within that time."
                    )
                    on_end()

        def tell() -> None:
            """Tell heads that this one has replaced, if they come back."""
            while (replaced := self._started.get("replaced")) and not self._is_stopping.wait(TELL_EVERY_S):
                secrets, own = self._secrets, self.headship
                for address in tell_replaced(replaced, own, self._started["id"], secrets.token, secrets.tls):
                    say(f"{address}, the head before this one, has come back. It was told, and ends.")

        threading.Thread(target=look, name="watch-head", daemon=True).start()
        threading.Thread(target=tell, name="tell-replaced", daemon=True).start()

    def stop(self) -> None:
        """End Ray on this machine, then the store."""
        self._is_stopping.set()
        if self._joins is not None:
            self._joins.stop()
        if self._service is not None:
            self._service.close()
        if self._ray is not None:
            self._ray.stop()
        if self._store is not None:
            self._store.stop()

    def continues(self, application: Mapping[str, Any]) -> bool:
        """Tell whether the cluster already has this application, so that nothing must be deployed."""
        return self._started.get("application") == application

    def refuse_two_changes(self, application: Mapping[str, Any]) -> None:
        """Refuse to deploy another application from other sources: the other machines may still run the earlier ones.

        Raises:
            CannotStart: Both have changed.
        """
        known, before = self._started.get("application"), self._started.get("sources")
        if known is None or known == application or before == sources_digest():
            return
        changed = ", ".join(key for key in sorted({*known, *application}) if known.get(key) != application.get(key))
        raise CannotStart(
            f"The cluster in {self._folder.store_log} runs another application ({changed}), and was started from other "
            "sources of Orchard, so that it cannot be upgraded machine by machine. Start with the earlier sources or "
            "the earlier configuration; or let the other machines leave, start with --new-cluster, and let them join "
            "again."
        )

    def note_deployed(self, application: Mapping[str, Any]) -> None:
        """Note the application that the cluster has now, and that this head has these sources."""
        self._note(dict(application), sources_digest())

    def describe(self) -> str:
        """Return what the operator must know to let other machines join. Raises FolderError."""
        token = read_join_token(self._folder) if sys.stderr.isatty() else "TOKEN"
        where = "" if sys.stderr.isatty() else f" TOKEN is in {self._folder.join_token}."
        plain = "" if self._secrets.tls is not None else " --no-tls: all traffic of the cluster can be read on its way."
        return (
            f"This machine is the head of a cluster. On each other machine: orchard join {self._host} --token {token}\n"
            f"The token gives the right to run code on every machine of the cluster.{where}{plain}"
        )

    @cached_property
    def _resources(self) -> dict[str, float]:
        scorer = {"mlx_scorer": 1.0} if self._config.args.resolved().spec_prefill.enabled else {}
        return {"mlx": float(self._config.args.engines_here()), **scorer}

    def _models(self) -> list[tuple[str, str | None]]:
        return models_of_a_node(self._config.args.resolved())

    def _facts(self) -> dict[str, Any]:
        facts = read_facts(self._models())
        return {
            "facts": facts.as_json(),
            "gcs": self.address,
            "url": url_of(self._config),
            "resources": self._resources,
            "engines_per_node": self._config.args.engines_per_node,
            "device": self._config.args.engine.device,
            "term": self.headship.term,
        }

    def _shared(self) -> dict[str, Any]:
        """Return what a member needs to become the head, or to serve alone."""
        return {"started": self._started, "config": self._config.raw}

    def _on_adopted(self, headship: Headship) -> None:
        """End this head, as on Ctrl-C: its answers may finish."""
        say(
            f"{headship.address} has taken over the cluster of this machine, which is no longer its head and ends. "
            f"Join it: orchard join {headship.address}"
        )
        write_headship(self._folder, headship)
        os.kill(os.getpid(), signal.SIGTERM)

    def _ended(self) -> str | None:
        if self._store is not None and self._store.has_ended:
            return "The store of Ray's GCS"
        if self._ray is not None and self._ray.has_ended:
            return "Ray"
        return None

    def _note(self, application: Any = None, sources: str | None = None) -> None:
        changed = {
            "address": self._host,
            "serve": self._serve_options(),
            "versions": _versions(),
            "sources": sources,
            "tls": self._secrets.tls is not None,
            "application": application,
            "id": self._started.get("id") or secrets.token_hex(8),
        }
        self._started = {**self._started, **changed}
        self._folder.note_started(self._started)

    def _serve_options(self) -> dict[str, Any]:
        return {key: self._config.raw[key] for key in SERVE_KEYS if self._config.raw.get(key) is not None}

    def _refuse_other_address(self) -> None:
        known = self._started.get("address", self._host)
        if known != self._host:
            raise CannotStart(
                f"The cluster in {self._folder.store_log} has its head at {known}, where its machines look for it, and "
                f"this machine's address is {self._host}. Give it that address (--interface {known}), or start a new "
                "cluster with --new-cluster, which the other machines must join again."
            )

    def _refuse_other_versions(self) -> None:
        known, now = self._started.get("versions"), _versions()
        if known is None or known == now:
            return
        raise CannotStart(
            f"The cluster in {self._folder.store_log} was started with {_listed(known)}, which all its machines must "
            f"have in common, and this machine has {_listed(now)}. Start with those; or let the other machines leave, "
            "start with --new-cluster, and let them join again."
        )

    def _refuse_other_serve_options(self) -> None:
        known, now = self._started.get("serve"), self._serve_options()
        if known is None or known == now:
            return
        changed = [key for key in SERVE_KEYS if known.get(key) != now.get(key)]
        differences = "; ".join(f"{key}: {known.get(key)} there, {now.get(key)} here" for key in changed)
        raise CannotStart(
            f"The cluster in {self._folder.store_log} was started with other options, which a running Serve keeps "
            f"({differences}). Start with those, or start a new cluster with --new-cluster, which the other machines "
            "must join again."
        )


def _versions() -> dict[str, str]:
    """Return the versions that Ray wants to be equal on all machines."""
    return {"Python": platform.python_version(), "ray": package_versions()["ray"]}


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def models_of_a_node(args: AppArgs) -> list[tuple[str, str | None]]:
    """Return name and revision of each model that a node loads; the demo's draft belongs to Orchard's own files.

    A head beside the model is one of them, where it may be used.
    """
    engine, scorer = args.engine, args.spec_prefill
    models = [(engine.model, engine.revision), *(one for one in engine.draft_checkpoints if one[0] != "demo")]
    if engine.mtp != "off" and (engine.mtp_head is None or OWN_HEAD in engine.mtp_heads):
        here = checkpoint_here(engine.model, engine.revision)
        models += [(str(path), None) for path in (heads_beside(here) if here else ())]
    if scorer.enabled and scorer.draft_model not in (None, "demo"):
        models.append((scorer.draft_model, scorer.draft_revision))
    return models


def await_free(host: str, numbers: tuple[int, ...]) -> None:
    """Wait for processes of an earlier start to release their ports. Raises CannotStart."""
    deadline = time.monotonic() + LEFTOVER_S
    while (taken := [port for port in numbers if _answers(host, port)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if taken:
        raise CannotStart(
            f"port {taken[0]} of {host} is in use: Ray runs on this machine already. End it by `orchard leave` if this "
            "machine belongs to a cluster, else by `ray stop`."
        )


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True
