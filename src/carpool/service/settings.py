"""The settings of a server: one schema for the command line, the environment, the file and Python.

A setting has its name, type, default and text here only. Those that an `App` has under any server
are `AnswerSettings`, which `http/app.py` checks, as the parts of the app do; `http/serve.py` checks
the others. `carpool serve --help` shows the docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, get_args, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])


class UsualText(str):
    """A text that counts because nobody has said another one, nor this one."""


class UsualNumber(int):
    """A number of this kind."""


class AnswerSettings(TypedDict, total=False):
    """Who may ask, how requests are answered, and what is written down of them, under any server.

    Attributes:
        api_keys: A file with the keys of those who may ask, a line NAME:KEY or NAME:sha256:HEX
            each; see carpool key. The environment may have further ones in CARPOOL_API_KEYS.
        open_readyz: Answer /readyz without a key, as /livez always is, for a prober that has none.
        allow_host: A name by which clients may call the server, such as api.example.com or
            *.example.com; it may be given several times, and * stands for any name. Without it a
            server on a loopback address answers to local names only, and any other to all names.
        cors_origin: A site whose pages may ask, such as https://example.com; it may be given
            several times, and * stands for any site.
        root_path: What a proxy puts before each path, such as /api; it may also cut it off.
        compress: How answers may be compressed for clients that accept it: zstd, gzip, or both in
            the order of preference, zstd,gzip.
        compress_from_bytes: The size of the smallest answer that is compressed.
        when_full: What to do with a request while the queue is full: refuse it with 429, or let it
            wait until its deadline.
        timeout_status: The HTTP status of a request whose deadline has passed.
        accept_compressed: Read compressed request bodies (Content-Encoding: gzip, deflate, zstd),
            which count expanded for the size of the largest body.
        debug: Show the texts of exceptions in error responses. Not for production.
        access_log: The share of requests that get a line in the log: 1 for all, 0.01 for one in a
            hundred, 0 for none. Errors always get one, probes that are answered 200 never.
        access_log_slow_ms: A request that takes longer gets a line whatever the share.
        server_timing: Send each client in Server-Timing how long its request waited and was
            computed.
        trace: Make spans of requests and batches, and send them where OpenTelemetry's own variables
            say (OTEL_EXPORTER_OTLP_ENDPOINT). It needs carpool[otel].
    """

    api_keys: Annotated[str | Path | None, None]
    open_readyz: Annotated[bool, False]
    allow_host: Annotated[Sequence[str], ()]
    cors_origin: Annotated[Sequence[str], ()]
    root_path: Annotated[str, ""]
    compress: Annotated[str, ""]
    compress_from_bytes: Annotated[int, 1024]
    when_full: Annotated[Literal["refuse", "wait"], "refuse"]
    timeout_status: Annotated[Literal[504, 408], 504]
    accept_compressed: Annotated[bool, False]
    debug: Annotated[bool, False]
    access_log: Annotated[float, 0.0]
    access_log_slow_ms: Annotated[float | None, None]
    server_timing: Annotated[bool, False]
    trace: Annotated[bool, False]


class ServerSettings(AnswerSettings, total=False):
    """How a server listens, what a client may take up, and where workers run; and `AnswerSettings`.

    Each may be left out; its default stands behind its type.

    Attributes:
        host: The address to listen on. 0.0.0.0 makes the services reachable from other machines,
            for which keys are needed, or a client CA, or --insecure.
        port: The port to listen on; 0 takes a free one.
        socket: The path of a Unix socket to listen on, in the place of host and port.
        socket_mode: Who may connect to that socket, as the permissions of a file: 600 is this user
            only.
        fd: The number of a socket that listens already, as systemd hands it over (3), in the place
            of host and port.
        insecure: Listen on a public address although everybody may ask.
        tls_cert: The file with the server's certificate (PEM). It is read again when it is renewed.
        tls_key: The file with its private key, unless the certificate's file has it.
        tls_client_ca: A file with roots: only clients with a certificate from there are let in.
        admin_address: Another address for /metrics, /dashboard and what changes the server, as
            HOST:PORT or unix:PATH. They are then not at the main address.
        max_body_mb: The size of the largest request body, in MiB.
        max_connections: How many connections may be open at a time.
        max_header_bytes: The size of all header lines of a request.
        max_headers: How many header lines a request may have.
        max_pipelined: How many requests of one connection may be at work at a time.
        header_timeout_s: The seconds in which a request's head must arrive.
        body_timeout_s: The seconds in which a request's body must arrive.
        idle_timeout_s: The seconds for which a connection may be idle.
        write_timeout_s: The seconds for which a client may take nothing of its answers.
        drain_delay_s: The seconds for which requests are still served after SIGTERM, while /readyz
            says already that the server drains, so that a balancer has taken it out before it
            refuses any.
        join: Where workers of stages with join=True connect (see carpool worker): HOST:PORT, or the
            path of a Unix socket.
        join_token: A file with the token that such workers must know; a Unix socket can do without.
        join_cert: A file with the certificate that such workers see, for TLS.
        join_key: A file with the key of that certificate, if it is not in the same file.
        join_ca: A file with certificates of those who vouch for the workers, which then need one
            each.
        on: Where worker processes run: ray for a Ray cluster (the one of RAY_ADDRESS or of this
            machine, or a new one).
        reload: How SIGHUP, carpool reload and --watch replace workers: beside starts all new ones
            before an old one goes; rolling replaces one at a time, where there is no memory for
            both.
        watch: Reload when a Python file below the current folder changes. For development.
        protocol: A protocol of other servers to speak besides carpool's own addresses: oip,
            kserve-v1, sagemaker, openai, rerank, vertex, or module:attribute for one of yours. It
            may be given several times; all are enabled by default, and none disables them.
        vertex: Listen and answer as Vertex AI wants it: on all addresses, at port AIP_HTTP_PORT
            (8080), and at AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE. Enabled automatically where
            these variables are set.
        log: Write log lines for people, or one JSON object per line.
        log_level: The least important lines that are shown, also of your models' own loggers: debug
            says now and then why batches go when they do, info logs starts and ends, warning of
            requests that are refused or late, error of lost workers and of what models raise. What
            models print is always shown.
    """

    host: Annotated[str, UsualText("127.0.0.1")]
    port: Annotated[int, UsualNumber(8000)]
    socket: Annotated[str | None, None]
    socket_mode: Annotated[str, "600"]
    fd: Annotated[int | None, None]
    insecure: Annotated[bool, False]
    tls_cert: Annotated[str | None, None]
    tls_key: Annotated[str | None, None]
    tls_client_ca: Annotated[str | None, None]
    admin_address: Annotated[str | None, None]
    max_body_mb: Annotated[float, 16.0]
    max_connections: Annotated[int, 1024]
    max_header_bytes: Annotated[int, 32 * 1024]
    max_headers: Annotated[int, 64]
    max_pipelined: Annotated[int, 16]
    header_timeout_s: Annotated[float, 10.0]
    body_timeout_s: Annotated[float, 30.0]
    idle_timeout_s: Annotated[float, 75.0]
    write_timeout_s: Annotated[float, 30.0]
    drain_delay_s: Annotated[float, 0.0]
    join: Annotated[str | None, None]
    join_token: Annotated[str | None, None]
    join_cert: Annotated[str | None, None]
    join_key: Annotated[str | None, None]
    join_ca: Annotated[str | None, None]
    on: Annotated[Literal["ray"] | None, None]
    reload: Annotated[Literal["beside", "rolling"], "beside"]
    watch: Annotated[bool, False]
    protocol: Annotated[tuple[str, ...], ()]
    vertex: Annotated[bool, False]
    log: Annotated[Literal["text", "json"], "text"]
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "info"]


def types_and_defaults(schema: Any) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each setting of a schema, by name."""
    hints = get_type_hints(schema, include_extras=True)
    return {name: (get_args(hint)[0], get_args(hint)[1]) for name, hint in hints.items()}


def shows(schema: Any) -> Callable[[Function], Function]:
    """Have the signature of a function show the settings of a schema, and not `**settings`."""

    def with_settings(function: Function) -> Function:
        shown = inspect.signature(function)
        *others, _ = shown.parameters.values()
        settings = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in types_and_defaults(schema).items()
        ]
        function.__signature__ = shown.replace(parameters=[*others, *settings])  # type: ignore[attr-defined]
        return function

    return with_settings


_HINTS: Final = types_and_defaults(ServerSettings)

NAMES: Final = tuple(sorted(_HINTS, key=AnswerSettings.__annotations__.__contains__))
"""The names of all settings, in order: those of the server first."""

_DEFAULTS: Final = {name: _HINTS[name][1] for name in NAMES}

LISTS: Final = frozenset(name for name, default in _DEFAULTS.items() if isinstance(default, tuple))
"""Those that may have several values."""

MAY_BE_EMPTY: Final = LISTS | {name for name, default in _DEFAULTS.items() if default == ""}
"""Those of which nothing at all is a value."""

_, _, _TEXTS_OF_ANSWERS = (AnswerSettings.__doc__ or "").partition("Attributes:\n")

ServerOptions: Any = make_dataclass(
    "ServerOptions",
    [(name, _HINTS[name][0], field(default=_DEFAULTS[name])) for name in NAMES],
    frozen=True,
    kw_only=True,
    namespace={"__doc__": f"{(ServerSettings.__doc__ or '').rstrip()}\n{_TEXTS_OF_ANSWERS}", "__module__": __name__},
)
"""The settings as a dataclass, of which the command line makes its flags."""


def with_defaults(given: ServerSettings) -> ServerSettings:
    """Return all settings: those that are given, and the defaults of the others.

    Raises:
        TypeError: There is no such setting.
    """
    for name in given:
        if name not in _DEFAULTS:
            raise TypeError(f"a server has no setting {name!r}; there are {', '.join(NAMES)}")
    settings: Any = {**_DEFAULTS, **given}
    return settings  # type: ignore[no-any-return]
