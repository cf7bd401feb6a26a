"""Every setting, declared once: type, default, unit, what it is and why one would change it.

Flags, environment variables, TOML, `prefix-proxy config` and deploy/CONFIG.md are all made from these classes.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from proxy.config import checks
from proxy.config.setting import ENV_PREFIX, Setting

# A setting reads as one paragraph; the formatter would make a column of each.
# fmt: off
_KIB, _MIB = 1024, 1024 * 1024
_SECRET_ADVICE = "Set it by environment variable or in a file that only the proxy's user can read."


@dataclass(frozen=True, slots=True)
class Upstream:
    """The vLLM server that answers."""

    url: Annotated[str, Setting(
        "vLLM's address; a trailing /v1 or slash is dropped.", "vLLM listens elsewhere, or on a unix socket.",
        allowed="http://HOST:PORT, https://HOST:PORT or unix:/PATH", check=checks.upstream_url,
        flag="--upstream", short=ENV_PREFIX + "UPSTREAM",
    )] = "http://127.0.0.1:8000"
    api_key: Annotated[str | None, Setting(
        "The key that vLLM was started with (--api-key). Clients' keys never go there.", _SECRET_ADVICE,
        secret=True, check=checks.header_value, allowed="visible ASCII without spaces",
    )] = None
    connect_seconds: Annotated[float, Setting(
        "How long connecting may take.", "vLLM is on another, slow network.", "seconds", 0.05, 300,
    )] = 5.0
    idle_seconds: Annotated[float, Setting(
        "How long vLLM may be silent before the exchange counts as failed; there is no limit on the whole.",
        "Long prompts wait in a long queue (raise), or a hung vLLM must show sooner (lower).", "seconds", 0.05, 86400,
    )] = 600.0
    pool_idle_seconds: Annotated[float, Setting(
        "How long an unused connection to vLLM is kept. vLLM closes its own after 5 seconds: stay below.",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE was changed.", "seconds", 0, 3600,
    )] = 4.0


@dataclass(frozen=True, slots=True)
class Listen:
    """Where clients reach the proxy."""

    host: Annotated[str, Setting(
        "Address to listen on. Anything but loopback needs keys, or allow_anonymous.",
        "Open WebUI runs on another machine or in a container.", allowed="an address or host name",
        check=checks.host, flag="--host", short=ENV_PREFIX + "HOST",
    )] = "127.0.0.1"
    port: Annotated[int, Setting(
        "Port to listen on; 0 takes a free one and prints it.", "9000 is taken.",
        low=0, high=65535, flag="--port", short=ENV_PREFIX + "PORT",
    )] = 9000
    allow_anonymous: Annotated[bool, Setting(
        "Serve callers without a key on a non-loopback address. They are never trusted to name a user.",
        "Something in front of the proxy already decides who may call.", flag="--allow-anonymous",
    )] = False
    allow_hosts: Annotated[tuple[str, ...], Setting(
        "Further names by which browsers may reach the internal routes, the status page and the WebSocket "
        "(Host header), beside loopback and listen.host.",
        "The proxy is reached under a DNS name.", allowed="host names without port", check=checks.hosts,
    )] = ()


@dataclass(frozen=True, slots=True)
class Relay:
    """How answers are passed on."""

    keepalive_seconds: Annotated[float, Setting(
        "A comment line is sent in a stream after this much silence.",
        "Something between cuts idle connections sooner.", "seconds", 0.01, 3600,
    )] = 15.0


@dataclass(frozen=True, slots=True)
class Drain:
    """What happens at SIGTERM."""

    seconds: Annotated[float, Setting(
        "How long running streams may go on after SIGTERM.",
        "Answers are longer, or the service manager kills sooner.", "seconds", 0, 3600, flag="--drain-seconds",
    )] = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may hold; above it is refused."""

    body_bytes: Annotated[int, Setting(
        "Largest body of a request, inflated.", "Requests with many large images.", "bytes", 1024, 1024 * _MIB,
    )] = 32 * _MIB
    body_seconds: Annotated[float, Setting(
        "How long a client may take to send its body.", "Clients on slow lines.", "seconds", 0.05, 3600,
    )] = 60.0
    messages: Annotated[int, Setting(
        "Most messages in a request.", "Very long agent runs.", "messages", 1, 100_000,
    )] = 4096
    images: Annotated[int, Setting("Most images in a request.", "The model takes more.", "images", 0, 10_000)] = 64
    n: Annotated[int, Setting(
        "Most answers to one request (its field n).", "Clients sample many answers.", "answers", 1, 1000,
    )] = 8
    tokenize_bytes: Annotated[int, Setting(
        "Largest body on /tokenize and /detokenize: a large one holds up vLLM's API server for all.",
        "Whole books are counted.", "bytes", 1024, 64 * _MIB,
    )] = _MIB


@dataclass(frozen=True, slots=True)
class Images:
    """Where images may come from."""

    allow_hosts: Annotated[tuple[str, ...], Setting(
        "Hosts that image URLs may name; only data: URLs pass when empty. vLLM fetches them: run it with redirects off "
        "(VLLM_MEDIA_URL_ALLOW_REDIRECTS=0), else an allowed host can send it to an internal address.",
        "Images lie on a server of your own.", allowed="host names without port", check=checks.hosts,
    )] = ()


@dataclass(frozen=True, slots=True)
class Models:
    """The cache behind GET /v1/models."""

    refresh_seconds: Annotated[float, Setting(
        "How often vLLM is asked for its models.", "Adapters are loaded and unloaded often.", "seconds", 0.05, 3600,
    )] = 10.0


@dataclass(frozen=True, slots=True)
class Cors:
    """Browsers that call the proxy directly (Open WebUI's direct connections)."""

    origins: Annotated[tuple[str, ...], Setting(
        "Origins that may call from a browser.", "Direct connections are on in Open WebUI.",
        allowed="origins like https://chat.example, or *", check=checks.origins, flag="--cors-origins",
    )] = ()


@dataclass(frozen=True, slots=True)
class Metrics:
    """Who may read /metrics."""

    port: Annotated[int | None, Setting(
        "Serve /metrics on this port of listen.host instead of the main one.",
        "Prometheus must not pass the way users take.", low=1, high=65535, flag="--metrics-port",
    )] = None
    token_hash: Annotated[str | None, Setting(
        "Hash of the bearer token that /metrics asks for (made by `prefix-proxy keys NAME`).",
        "The port is reachable by others.", secret=True, allowed="sha256$SALT$DIGEST", check=checks.key_hash,
    )] = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The headers that name user, chat and message; they count only under a trusted key, on loopback, or if proven."""

    user_header: Annotated[str, Setting(
        "Header with the user's id.", "FORWARD_USER_INFO_HEADER_USER_ID was changed in Open WebUI.",
        check=checks.header_name, allowed="a header's name",
    )] = "X-OpenWebUI-User-Id"
    chat_header: Annotated[str, Setting(
        "Header with the chat's id.", "FORWARD_SESSION_INFO_HEADER_CHAT_ID was changed.",
        check=checks.header_name, allowed="a header's name",
    )] = "X-OpenWebUI-Chat-Id"
    message_header: Annotated[str, Setting(
        "Header with the message's id: add it to the connection in Open WebUI with the value {{MESSAGE_ID}}.",
        "The custom header has another name.", check=checks.header_name, allowed="a header's name",
    )] = "X-OpenWebUI-Message-Id"
    task_header: Annotated[str, Setting(
        "Header with the task's name: add it to the connection in Open WebUI with the value {{TASK}}.",
        "The custom header has another name.",
        check=checks.header_name, allowed="a header's name",
    )] = "X-OpenWebUI-Task"
    jwt_header: Annotated[str, Setting(
        "Header with the signed user.", "It was given another name in Open WebUI.",
        check=checks.header_name, allowed="a header's name",
    )] = "X-OpenWebUI-User-Jwt"
    jwt_secret: Annotated[str | None, Setting(
        "What signs it (FORWARD_USER_INFO_HEADER_JWT_SECRET of Open WebUI): proves a user under any key.",
        _SECRET_ADVICE,
        secret=True, check=checks.not_empty, allowed="any text but the empty one",
    )] = None


@dataclass(frozen=True, slots=True)
class Sessions:
    """How long and how much is remembered of a conversation."""

    ttl_seconds: Annotated[float, Setting(
        "A session is forgotten this long after its last exchange.",
        "Users come back later and vLLM's cache is large (raise).", "seconds", 0.05, 31_536_000,
    )] = 1800.0
    sweep_seconds: Annotated[float, Setting(
        "How often expired sessions are removed.", "Hardly ever.", "seconds", 0.05, 86400,
    )] = 300.0
    max_live: Annotated[int, Setting(
        "Most sessions kept; the one unused longest goes first.", "More users, more memory.", "sessions", 1, 10_000_000,
    )] = 10_000
    max_bytes_each: Annotated[int, Setting(
        "Most memory of one session's ledger.", "Very long chats with large documents.", "bytes", 4 * _KIB, 1024 * _MIB,
    )] = 4 * _MIB
    max_bytes_total: Annotated[int, Setting(
        "Most memory of all ledgers.", "The machine has more, or less, to spare.", "bytes", 4 * _KIB, 2**40,
    )] = 256 * _MIB


@dataclass(frozen=True, slots=True)
class Store:
    """What the database holds."""

    text: Annotated[bool, Setting(
        "Keep the text of messages in the database, not only digests and counts.",
        "A restart must not cost a cold turn, and whoever can read the file may read the chats.",
    )] = False
    write_delay_seconds: Annotated[float, Setting(
        "Writes are gathered for this long; as much may be lost in a crash.", "Hardly ever.", "seconds", 0, 60,
    )] = 0.5


@dataclass(frozen=True, slots=True)
class Log:
    """Logs, on stderr.  They never hold text of users, keys or header values."""

    format: Annotated[Literal["console", "json"], Setting(
        "One line for people, or one JSON object.", "A log collector reads it.", flag="--log-format",
    )] = "console"
    level: Annotated[Literal["debug", "info", "warning", "error"], Setting(
        "The least that is logged; one line per exchange is info.", "Too much, or too little to find a fault.",
        flag="--log-level",
    )] = "info"


@dataclass(frozen=True, slots=True)
class Record:
    """Recording requests for `prefix-proxy explain`."""

    dir: Annotated[str | None, Setting(
        "Folder that requests are recorded into, one JSON object a line; unset, nothing is recorded.",
        "To find out why a chat is computed anew.", allowed="a path", check=checks.path, flag="--record",
    )] = None
    redact: Annotated[bool, Setting(
        "Replace words and numbers by others of the same length, equal for equal ones, and ids by digests.",
        "The very text is needed, and everyone whose chats are recorded knows of it.",
    )] = True
    file_bytes: Annotated[int, Setting(
        "Size at which the next file is begun.", "Files are moved to somewhere else.", "bytes",
        4 * _KIB, 64 * 1024 * _MIB,
    )] = 64 * _MIB
    files: Annotated[int, Setting(
        "Most files kept; the oldest goes first.", "More, or less, room on the disk.", "files", 2, 100_000,
    )] = 16
