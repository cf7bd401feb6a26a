"""What was seen of a running vLLM: values only, for the checks to judge."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.template_verdicts import Checked

_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{([^}\n]{0,16000})\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]{0,4000})"')


@dataclass(frozen=True, slots=True)
class Timed:
    """One request for a single token: how long its prompt was, how much of that was cached, how long it took."""

    prompt_tokens: int
    cached_tokens: int | None  # None: usage does not say
    seconds: float


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM.  None is what could not be seen."""

    url: str
    problem: str = ""  # why nothing could be seen, in a sentence
    model: str = ""
    max_model_len: int | None = None
    version: str | None = None
    cache: Mapping[str, str] | None = None  # the labels of vllm:cache_config_info
    needs_key: bool = False
    open_paths: tuple[str, ...] = ()  # answer without the key
    beyond_loopback: bool | None = None  # reached by another of this machine's addresses too
    developer_routes: bool = False
    policy: str | None = None  # fcfs or priority; only a vLLM with developer routes tells
    cold: Timed | None = None  # a prompt that it had not seen
    warm: Timed | None = None  # the same once more
    idle_seconds: float | None = None  # until it closed an idle connection; None: not while that was watched
    watched_seconds: float = 0.0
    template: Checked | None = None
    fitting: Path | None = None
    tools_refused: bool | None = None
    tools_left_out: bool | None = None  # at tool_choice none

    @property
    def kv_tokens(self) -> int | None:
        """How many tokens the KV cache holds."""
        cache = self.cache or {}
        if (size := cache.get("kv_cache_size_tokens", "")).isdigit():
            return int(size)
        blocks, block = cache.get("num_gpu_blocks", ""), cache.get("block_size", "")
        return int(blocks) * int(block) if blocks.isdigit() and block.isdigit() else None

    @property
    def block_tokens(self) -> int | None:
        """How many tokens a block has."""
        size = (self.cache or {}).get("block_size", "")
        return int(size) if size.isdigit() else None

    @property
    def caches_prefixes(self) -> bool | None:
        """Whether prefixes are cached, as it says itself or as its answers show."""
        said = (self.cache or {}).get("enable_prefix_caching")
        if said in ("True", "False"):
            return said == "True"
        return bool(self.warm.cached_tokens) if self.warm and self.warm.cached_tokens is not None else None


def cache_labels(metrics: str) -> Mapping[str, str] | None:
    """Return the labels of vllm:cache_config_info, None if vLLM does not tell them."""
    found = _CACHE_INFO.search(metrics)
    return dict(_LABEL.findall(found[1])) if found else None
