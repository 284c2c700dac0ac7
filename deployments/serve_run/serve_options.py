"""Describes the options of serve_config.yaml that Ray Serve reads, for the reference."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One option of the configuration file."""

    path: str
    """Its path in the file; options of Orchard start below `args`."""
    values: str
    """Its choices, or its type and bounds."""
    default: str
    """Its default as JSON between backticks, with words around it where deployments differ; or `required`."""
    description: str


@dataclass(frozen=True)
class Section:
    """Options that belong together."""

    title: str
    description: str
    options: list[Option]


SERVE_SECTIONS = [
    Section(
        "Ray Serve",
        "options that Ray Serve reads; those that are not listed here are either derived by Orchard or have no effect, "
        "and are rejected with the reason",
        [
            Option(
                "proxy_location",
                "`EveryNode` or `HeadOnly`",
                '`"EveryNode"`',
                "nodes that answer HTTP, whether they hold the model or not",
            ),
            Option("http_options", "mapping", "required", "address of the HTTP server, see below"),
            Option(
                "controller_options",
                "mapping or `null`",
                "`null`",
                "`runtime_env` of Serve's controller, with `env_vars` only",
            ),
            Option(
                "logging_config",
                "mapping or `null`",
                "`null`",
                "how all processes log, see below; under `serve run` not Serve's controller and HTTP proxies",
            ),
            Option("tracing_config", "mapping or `null`", "`null`", "OpenTelemetry tracing of Serve"),
            Option("applications", "list; each entry: mapping", "required", "one of them is Orchard, see below"),
        ],
    ),
    Section(
        "http_options",
        "address of the HTTP server; a change takes effect when the server is restarted",
        [
            Option(
                "http_options.host",
                "text",
                "required",
                "address to listen on; any other than loopback needs API keys or `http.open: true`",
            ),
            Option("http_options.port", "integer, ≥ 1, ≤ 65535", "`8000`", "port to listen on"),
            Option(
                "http_options.root_path",
                "text",
                '`""`',
                "prefix of all paths that a gateway in front of the server removes from requests",
            ),
            Option(
                "http_options.keep_alive_timeout_s",
                "integer",
                "`90`",
                "seconds after which a connection without requests is closed",
            ),
            Option(
                "http_options.ssl_certfile",
                "text or `null`",
                "`null`",
                "certificate of the server; with it and ssl_keyfile the server answers HTTPS",
            ),
            Option("http_options.ssl_keyfile", "text or `null`", "`null`", "private key of the certificate"),
            Option("http_options.ssl_keyfile_password", "text or `null`", "`null`", "password of the private key"),
            Option(
                "http_options.ssl_ca_certs",
                "text or `null`",
                "`null`",
                "certificate authorities that the certificates of clients must come from",
            ),
        ],
    ),
    Section(
        "applications",
        "the application that is Orchard",
        [
            Option("applications[].name", "text", '`"default"`', "name of the application in Ray"),
            Option("applications[].route_prefix", "text", '`"/"`', "prefix of all routes"),
            Option("applications[].import_path", "text", "required", "`deployments.app:build_app`"),
            Option(
                "applications[].runtime_env", "mapping", "`{}`", "Ray's runtime environment of the replicas' processes"
            ),
            Option("applications[].args", "mapping", "`{}`", "options of Orchard, see above"),
            Option(
                "applications[].logging_config",
                "mapping or `null`",
                "`null`",
                "how the replicas log, see below; `null`: as at the top of the file",
            ),
            Option(
                "applications[].deployments",
                "list; each entry: mapping",
                "`[]`",
                "options of single deployments, see below",
            ),
        ],
    ),
    Section(
        "applications[].deployments",
        "options of a deployment; the number of replicas is none of them, since it follows from the cluster: one of "
        "each deployment per node that offers the resource `mlx`, and one SpecPrefillScorer per node that offers "
        "`mlx_scorer`",
        [
            Option(
                "applications[].deployments[].name",
                "`Ingress` or `TextMTP` or `MLLM` or `ModelReplica` or `SpecPrefillScorer`",
                "required",
                "deployment that the options are for; SpecPrefillScorer only with sparse prefill",
            ),
            Option(
                "applications[].deployments[].max_ongoing_requests",
                "integer, ≥ 1",
                "`1000000`",
                "TextMTP and MLLM only: requests that a planner holds at the same time; further ones wait at the "
                "ingress, and threads and bytes are bounded in any case",
            ),
            Option(
                "applications[].deployments[].health_check_period_s",
                "number, > 0",
                "`2` for ModelReplica and SpecPrefillScorer, else `10`",
                "seconds between health checks of a replica",
            ),
            Option(
                "applications[].deployments[].health_check_timeout_s",
                "number, > 0",
                "`10` for ModelReplica and SpecPrefillScorer, else `30`",
                "seconds after which a replica that does not answer a health check is unhealthy",
            ),
            Option(
                "applications[].deployments[].rolling_update_percentage",
                "number, > 0, ≤ 1",
                "`0.2`",
                "share of the replicas that are replaced at a time when the application is redeployed",
            ),
            Option(
                "applications[].deployments[].logging_config",
                "mapping",
                "that of the application",
                "how the replicas of the deployment log, see below",
            ),
        ],
    ),
    Section(
        "logging_config",
        "how processes log: at the top of the file, in an application or in a deployment",
        [
            Option("logging_config.encoding", "`TEXT` or `JSON`", '`"TEXT"`', "format of log lines"),
            Option("logging_config.log_level", "text or integer", '`"INFO"`', "lowest level that is logged"),
            Option(
                "logging_config.logs_dir",
                "text or `null`",
                "`null`",
                "directory of the log files; null: that of Ray's session",
            ),
            Option("logging_config.enable_access_log", "`true` or `false`", "`true`", "log a line for each request"),
            Option(
                "logging_config.additional_log_standard_attrs",
                "list; each entry: text",
                "`[]`",
                "attributes of Python's log records that are added to each line",
            ),
        ],
    ),
]
