"""A pasted command line of vLLM: flags that are gone or never were, and those that cost or lack.

What old guides recommend stands in the two tables, with what does it today; after vLLM 0.32.
"""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.doctor.finding import Finding, State, printable
from proxy.doctor.flag_names import FLAGS, OF_VERSION

MOST_BLOCK_TOKENS = 64
_GONE = "vLLM has no such flag any more and refuses to start with it"
_NEVER = "vLLM never had such a flag and refuses to start with it"
_LEAVE = "leave it out"
_QUEUE = "leave it out; vLLM batches with every step, and --max-num-batched-tokens bounds a step"
# Without their dashes: why not, and what to do today.
OLD_FLAGS: Mapping[str, tuple[str, str]] = {
    "scheduler-delay-factor": (_GONE, _QUEUE),
    "num-lookahead-slots": (_GONE, "leave it out; --speculative-config sets what speculative decoding needs"),
    "context-length-divisible": (_NEVER, "leave it out; nothing is padded"),
    "max-padding-limit": (_NEVER, "leave it out; nothing is padded"),
    "swap-space": (_GONE, "--kv-offloading-size GIB keeps chats that leave the GPU in host memory"),
    "max-num-partial-prefills": (_GONE, "--long-prefill-token-threshold N lets short prompts pass long ones"),
    "max-long-partial-prefills": (_GONE, "--long-prefill-token-threshold N lets short prompts pass long ones"),
    "disable-log-requests": (_GONE, "leave it out; requests are not logged unless --enable-log-requests says so"),
    "guided-decoding-backend": (_GONE, 'leave it out; or --structured-outputs-config \'{"backend": "xgrammar"}\''),
    "use-v2-block-manager": (_GONE, _LEAVE),
    "preemption-mode": (_GONE, "leave it out; what is preempted is computed anew, mostly from the prefix cache"),
    "cache-root": (_NEVER, "leave it out; the prefix cache lies in GPU memory, --kv-offloading-size adds host memory"),
    "scheduler": (_NEVER, "--scheduling-policy priority (or fcfs)"),
    "enable-paged-attention": (_NEVER, "leave it out; PagedAttention is how vLLM works, not a switch"),
    "paged-attention": (_NEVER, "leave it out; PagedAttention is how vLLM works, not a switch"),
    "max-batch-wait": (_NEVER, _QUEUE),
    "batch-window": (_NEVER, _QUEUE),
    "session-timeout": (_NEVER, "sessions.ttl_seconds of the proxy"),
}
# Words of configurations and code in old guides: what is wrong with each, and what to do today.
MYTHS: tuple[tuple[str, str, str, str], ...] = (
    (r"(?<![\w-])scheduler\s*[=:]\s*[\"']?multistage", "scheduler=multistage", "vLLM has no such scheduler",
     "--scheduling-policy priority"),
    (r"(?<![\w-])cache_root", "cache_root", "vLLM has no such setting",
     "nothing; --kv-offloading-size GIB where chats do not stay warm"),
    (r"engine\.clear_cache", "engine.clear_cache()", "vLLM has no such call; blocks leave the cache by themselves",
     'nothing; POST /v1/internal/session/clear {"all": true, "upstream_cache": true} on the proxy, in an emergency'),
    (r"\bguided_(?:json|choice|regex|grammar)\b", "guided_* fields",
     "vLLM ignores them with a 200: the answer is not constrained",
     "response_format, or structured_outputs: {\"choice\": [...]} in the request"),
    (r"(?<![\w-])(?:batch|collect|wait)\w*_window", "a waiting window to build batches",
     "it only makes everybody wait: vLLM adds requests to the running batch at every step", _LEAVE),
    (r"PagedAttention\s*[=:]|(?<![\w-])(?:use|enable)_paged_attention", "PagedAttention as a switch",
     "it is how vLLM works and cannot be switched", _LEAVE),
    (r"(?<![\w-])(?:SESSION_TIMEOUT\b|session_timeout)", "a session timeout in Open WebUI's configuration",
     "Open WebUI has no such setting for models", "sessions.ttl_seconds of the proxy"),
)  # fmt: skip
_IMAGE = re.compile(r"vllm-(openai|cpu)")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags of a command, by name without dashes; "" for one without a value."""

    flags: Mapping[str, str]
    contained: bool = False  # in a container, where every address is the container's own

    def has(self, name: str) -> bool:
        """Say whether a flag was given."""
        return name in self.flags


def judge_flags(text: str) -> list[Finding]:
    """Return what is to be said of a pasted command (also with `docker run` before it, or over several lines)."""
    try:
        words = shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError:
        return [_of("failed", "command line", "The text cannot be read: a quote is not closed.")]
    line = parse(words)
    named = len(_own_words(words)) < len(words)
    if not named and not line.flags and not any(re.search(pattern, text) for pattern, *_ in MYTHS):
        return [_of("failed", "command line", "There is no flag of vLLM in this text.")]
    found = [*_unusable(line), *_myths(text), *_harmful(line), *_missing(line)]
    well = not any(each.state == "mend" for each in found)
    return [*found, *([_of("well", "command line", f"All flags exist in vLLM {OF_VERSION}.")] if well else [])]


def parse(words: Sequence[str]) -> CommandLine:
    """Read words as vLLM does: underscores count as dashes, a value after a space or an equals sign."""
    flags: dict[str, str] = {}
    last = ""
    for word in _own_words(words):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flags[name], last = value, "" if equals else name
        elif last and (not word.startswith("-") or word[1:2].isdigit()):
            flags[last], last = word, ""
        else:
            last = ""
    return CommandLine(flags, any(_IMAGE.search(word) for word in words))


def _own_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words that vLLM itself gets: after `serve`, its module, or the image of a container."""
    for index, word in enumerate(words):
        if word == "serve" or word.endswith("openai.api_server") or _IMAGE.search(word):
            return words[index + 1 :]
    return words


def _unusable(line: CommandLine) -> Iterator[Finding]:
    for name in line.flags:
        base = name.partition(".")[0]
        if base in OLD_FLAGS:
            why, mend = OLD_FLAGS[base]
            yield _of("mend", f"--{base}", "This flag does not exist.", f"{why}.", mend)
        elif base not in FLAGS and base.removeprefix("no-") not in FLAGS:
            near = difflib.get_close_matches(base, FLAGS, 1, 0.75)
            mend = f"--{near[0]}, if that was meant" if near else _LEAVE
            shown = printable(base, 60)
            yield _of("mend", f"--{shown}", f"vLLM {OF_VERSION} has no such flag and refuses to start.", mend=mend)


def _myths(text: str) -> Iterator[Finding]:
    for pattern, name, why, mend in MYTHS:
        if re.search(pattern, text):
            yield _of("mend", name, "Recommended in old guides; it does not exist.", f"{why}.", mend)


def _harmful(line: CommandLine) -> Iterator[Finding]:
    if line.has("no-enable-prefix-caching"):
        why = "Every turn of every chat is computed from its first token."
        yield _of("mend", "prefix caching", "It is switched off.", why, "--enable-prefix-caching")
    if line.has("exclude-tools-when-tool-choice-none"):
        why = "Titles and tags go as their chat's own prompt with tool_choice none: without the tools nothing fits."
        yield _of("mend", "tools of tasks", "Tools leave the prompt at tool_choice none.", why,
                  "leave --exclude-tools-when-tool-choice-none out")  # fmt: skip
    if (size := line.flags.get("block-size", "")).isdigit() and int(size) > MOST_BLOCK_TOKENS:
        why = f"Only full blocks are cached: up to {int(size) - 1} tokens of each prompt are lost."
        yield _of("mend", "block size", f"Blocks have {size} tokens.", why, "leave --block-size out (CPU: 32)")
    if line.has("trust-request-chat-template"):
        why = "A request may bring its own template, which vLLM then runs; the proxy forwards none."
        yield _of("note", "chat template", "Requests may bring templates.", why, "leave it out")
    host = line.flags.get("host", "" if line.has("uds") else "0.0.0.0")
    if host and line.contained:
        why = "With `-p 8000:8000` everybody on the network has the model, past the proxy; no key guards /invocations."
        yield _of("note", "open endpoints", "Who reaches the container reaches vLLM.", why, "-p 127.0.0.1:8000:8000")
    elif host and host not in _LOOPBACK:
        why = "/invocations, /tokenize and /metrics take no key, also with --api-key: whoever reaches it has the model."
        yield _of("mend", "open endpoints", "vLLM listens beyond this machine.", why,
                  "--uds PATH or --host 127.0.0.1, and let clients reach the proxy only")  # fmt: skip
    if line.has("api-key"):
        yield _of("note", "key", "Everybody on the machine can read the key.", "Command lines are seen by all.",
                  "VLLM_API_KEY in the environment")  # fmt: skip
    if line.has("enable-log-requests"):
        yield _of("note", "log", "Requests are logged.", "At DEBUG with what users wrote.", "leave it out")


def _missing(line: CommandLine) -> Iterator[Finding]:
    if not line.has("enable-prompt-tokens-details"):
        why = "usage does not say what was cached: the proxy's figures and Open WebUI's are blind."
        yield _of("mend", "prompt tokens details", "The flag is missing.", why, "--enable-prompt-tokens-details")
    if not (line.has("enable-auto-tool-choice") and line.has("tool-call-parser")):
        why = "Open WebUI sends tools with every chat, which vLLM refuses with a 400 otherwise."
        yield _of("mend", "tool parser", "Tools are refused.", why,
                  "--enable-auto-tool-choice --tool-call-parser hermes (or llama3_json, mistral ...)")  # fmt: skip
    if line.flags.get("scheduling-policy") != "priority":
        why = "With it titles and tags wait behind chats (the proxy's step rank)."
        yield _of("note", "scheduling policy", "First come, first served.", why, "--scheduling-policy priority")
    if not line.has("max-num-queued-reqs"):
        why = "The queue has no end; the proxy's admission.concurrent bounds it too, and lets chats take turns."
        yield _of("note", "queue", "No limit is set.", why, "--max-num-queued-reqs N, or the proxy's")
    if not line.has("shutdown-timeout"):
        why = "At SIGTERM running answers end at once with an error."
        yield _of("note", "shutdown", "Answers are cut.", why, "--shutdown-timeout 30")


def _of(state: State, check: str, says: str, why: str = "", mend: str = "") -> Finding:
    return Finding("flags", check, state, says, why, mend)
