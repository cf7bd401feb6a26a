"""Settings of what is counted and held back: tokens of prompts, rates of callers, requests at once."""

from dataclasses import dataclass
from typing import Annotated

from proxy.config import checks
from proxy.config.setting import Setting

# A setting reads as one paragraph; the formatter would make a column of each.
# fmt: off


@dataclass(frozen=True, slots=True)
class Tokens:
    """How tokens of a prompt are counted where vLLM's own count of an earlier turn does not settle it."""

    wait_seconds: Annotated[float, Setting(
        "How long vLLM's /tokenize may take; then the proxy counts by itself, roughly. After three failures in a row "
        "it is left alone for ten seconds.", "vLLM is slow under load and counts must be exact (raise).",
        "seconds", 0.05, 60,
    )] = 2.0
    local_file: Annotated[str | None, Setting(
        "The model's tokenizer.json, for when vLLM does not count; needs `pip install prefix-proxy[tokens]`. Without "
        "it a prompt then counts as many tokens as it has bytes, a sure upper bound.",
        "vLLM has no /tokenize, or is often too slow for it.", allowed="a path", check=checks.path,
    )] = None
    per_image: Annotated[int, Setting(
        "What an image counts until vLLM's usage has shown it.", "The model takes many more, or fewer, for one.",
        "tokens", 0, 32_768,
    )] = 1536


@dataclass(frozen=True, slots=True)
class Rates:
    """What one tenant may ask: a user whom a trusted key names, else all callers of a key together.

    Keys have the same three limits of their own ([[keys]]); where both are set, both hold. Above a limit: 429.
    """

    tenant_requests_per_minute: Annotated[int | None, Setting(
        "Requests a minute; as many at once as a minute allows.", "Single users keep others waiting.",
        "requests", 1, 1_000_000,
    )] = None
    tenant_tokens_per_minute: Annotated[int | None, Setting(
        "Tokens a minute that vLLM had to compute: prompt without what was cached, and answer. Known when an answer "
        "ends, so the requests after it pay.", "Single users keep others waiting.", "tokens", 1, 1_000_000_000,
    )] = None
    tenant_concurrent: Annotated[int | None, Setting(
        "Requests at once. Open WebUI sends up to four a turn.", "Single users keep others waiting.",
        "requests", 1, 100_000,
    )] = None


@dataclass(frozen=True, slots=True)
class Admission:
    """How many requests are at vLLM at once. When all places are taken tasks are refused, and chats wait in line."""

    concurrent: Annotated[int | None, Setting(
        "Most requests at vLLM at once; none: vLLM queues them itself.",
        "Under load users should be told to come back rather than wait, and tasks should give way to chats.",
        "requests", 1, 100_000, flag="--max-concurrent",
    )] = None
    queue_seconds: Annotated[float, Setting(
        "How long a request waits for a place, then 503 with Retry-After.",
        "Clients give up sooner, or can wait longer.", "seconds", 0, 600,
    )] = 30.0
    queue_requests: Annotated[int, Setting(
        "Most requests in line, tenants taking turns; one more is refused at once.",
        "More users than that wait gladly.", "requests", 0, 100_000,
    )] = 256
