"""What is to be said of a running vLLM.  Pure: a `Server` in, findings out; each check one function."""

import re
from collections.abc import Iterator, Mapping

from proxy.config.groups import Upstream
from proxy.core.template_cause import Cause
from proxy.core.template_check import checked, stable
from proxy.doctor.finding import Finding, State, printable
from proxy.doctor.flags import MOST_BLOCK_TOKENS
from proxy.doctor.server import Server

_OLDEST = (0, 20)
_FEW_CHATS = 2
# By what a model's name says; first match.
_PARSERS: Mapping[str, str] = {
    "qwen3-coder": "qwen3_coder", "qwen": "hermes", "hermes": "hermes", "llama": "llama3_json", "mistral": "mistral",
    "mixtral": "mistral", "deepseek": "deepseek_v3", "gpt-oss": "openai", "granite": "granite",
}  # fmt: skip


def parser_for(model: str) -> str | None:
    """Return the tool parser that a model's name suggests, None if it suggests none."""
    name = model.lower()
    return next((parser for word, parser in _PARSERS.items() if word in name), None)


def judge_vllm(server: Server) -> list[Finding]:
    """Return what every check says."""
    if server.problem:
        mend = "PREFIX_PROXY_UPSTREAM_API_KEY with vLLM's own key" if server.needs_key else "the address of --upstream"
        return [_of("failed", "reachable", printable(server.problem), mend=mend)]
    checks = (_version, _prefixes, _details, _blocks, _template, _tools, _tools_of_tasks, _scheduling, _context,
              _idle, _doors)  # fmt: skip
    return [finding for check in checks for finding in check(server)]


def _version(server: Server) -> Iterator[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)", server.version or "")
    if server.version is None:
        yield _of("note", "version", "/version does not answer: something stands before vLLM, or it is none.")
    elif numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        why = "The proxy is made for 0.20 and newer: older ones lack routes and counts that it uses."
        yield _of("mend", "version", f"vLLM {printable(server.version, 40)}.", why, "a newer vLLM")
    else:
        yield _of("well", "version", f"vLLM {printable(server.version, 40)}, model {printable(server.model, 80)}.")


def _prefixes(server: Server) -> Iterator[Finding]:
    on = server.caches_prefixes
    if on is None:
        yield _of("failed", "prefix caching", "It cannot be seen: neither /metrics nor usage tells.",
                  mend="--enable-prompt-tokens-details; and leave --disable-log-stats out")  # fmt: skip
    elif on:
        yield _of("well", "prefix caching", _told("On", _times(server)))
    else:
        why = "Every turn of every chat is computed from its first token; the proxy can spare nothing."
        yield _of("mend", "prefix caching", _told("Off", _times(server)), why, "--enable-prefix-caching")


def _told(word: str, more: str) -> str:
    return f"{word}: {more}." if more else f"{word}."


def _times(server: Server) -> str:
    """Say what a prompt took, new and once more: what the cache spares, measured here."""
    cold, warm = server.cold, server.warm
    if cold is None or warm is None:
        return ""
    return f"a prompt of {cold.prompt_tokens:,} tokens took {cold.seconds:.2f} s, once more {warm.seconds:.2f} s"


def _details(server: Server) -> Iterator[Finding]:
    warm = server.warm
    if warm is None:
        yield _of("failed", "prompt tokens details", "No answer came to a request for one token.",
                  mend="vLLM's log says why")  # fmt: skip
    elif warm.cached_tokens is None:
        why = "usage does not say what was cached: the proxy's figures and Open WebUI's are blind."
        yield _of("mend", "prompt tokens details", "Not told.", why, "--enable-prompt-tokens-details")
    else:
        says = f"Told: {warm.cached_tokens:,} of {warm.prompt_tokens:,} tokens cached."
        yield _of("well", "prompt tokens details", says)


def _blocks(server: Server) -> Iterator[Finding]:
    size = server.block_tokens
    if size is None:
        yield _of("note", "block size", "Not to be seen: /metrics does not tell it.")
    elif size > MOST_BLOCK_TOKENS:
        why = f"Only full blocks are cached: up to {size - 1} tokens at the end of each prompt are computed again."
        yield _of("mend", "block size", f"{size} tokens.", why, "--block-size 32 (on a GPU leave it out: 16)")
    else:
        yield _of("well", "block size", f"{size} tokens.")


def _template(server: Server) -> Iterator[Finding]:
    found = server.template
    if found is None or not checked(found.verdicts):
        yield _of("failed", "chat template", "It could not be checked: /tokenize renders no plain chat.",
                  mend="prefix-proxy template check --upstream says more")  # fmt: skip
        return
    if stable(found.verdicts):
        yield _of("well", "chat template", "Stable: each turn begins with the one before it.")
        return
    broken = [each for each in found.verdicts if each.outcome == "unstable" and each.counted]
    causes = ", ".join(dict.fromkeys(str(each.cause) for each in broken))
    cost = f" ({_times(server)})" if _times(server) and server.caches_prefixes else ""
    why = f"From there on a turn is computed anew, whatever the proxy sends{cost}."
    names = ", ".join(each.case for each in broken[:5])
    yield _of("mend", "chat template", f"Not stable: {causes} (cases: {names}).", why, _template_mend(server, causes))


def _template_mend(server: Server, causes: str) -> str:
    if server.fitting is not None:
        return f"--chat-template {server.fitting}"
    if causes == str(Cause.DATE):
        return 'a template without a clock, or --default-chat-template-kwargs \'{"date_string": "..."}\''
    return "a template made after one of deploy/chat_templates (its README says how)"


def _tools(server: Server) -> Iterator[Finding]:
    if server.tools_refused is None:
        yield _of("note", "tool parser", "Not to be seen: the request with tools failed otherwise.")
    elif server.tools_refused:
        why = "Open WebUI sends its tools with every chat: each is answered with a 400."
        parser = parser_for(server.model) or "NAME"
        yield _of("mend", "tool parser", "Tools are refused.", why,
                  f"--enable-auto-tool-choice --tool-call-parser {parser}")  # fmt: skip
    else:
        yield _of("well", "tool parser", "Tools are taken.")


def _tools_of_tasks(server: Server) -> Iterator[Finding]:
    if server.tools_left_out:
        why = "Titles and tags go as their chat's own prompt with tool_choice none: without tools nothing fits."
        yield _of("mend", "tools of tasks", "Tools leave the prompt at tool_choice none.", why,
                  "leave --exclude-tools-when-tool-choice-none out")  # fmt: skip
    elif server.tools_left_out is False:
        yield _of("well", "tools of tasks", "Tools stay in the prompt at tool_choice none.")


def _scheduling(server: Server) -> Iterator[Finding]:
    why = "With it titles and tags wait behind chats (the proxy's step rank)."
    says = "First come, first served." if server.policy == "fcfs" else "Not to be seen from outside."
    if server.policy == "priority":
        yield _of("well", "scheduling policy", "By priority.")
    else:
        yield _of("note", "scheduling policy", says, why, "--scheduling-policy priority")


def _context(server: Server) -> Iterator[Finding]:
    room, longest = server.kv_tokens, server.max_model_len
    if room is None or longest is None or longest <= 0:
        yield _of("note", "context", "Length or capacity is not told.")
        return
    says = f"{room:,} tokens of KV cache, {longest:,} a chat at most: {room / longest:.1f} full chats stay warm."
    if room < _FEW_CHATS * longest:
        why = "A second long chat drives the first one out of the cache: both are computed anew with every turn."
        shorter = max(1024, room // 4 // 1024 * 1024)
        mend = f"--max-model-len {shorter}, --kv-cache-dtype fp8 or --kv-offloading-size GIB"
        yield _of("mend", "context", says, why, mend)
    else:
        yield _of("well", "context", says)


def _idle(server: Server) -> Iterator[Finding]:
    kept = Upstream().pool_idle_seconds
    if server.watched_seconds == 0:
        yield _of("note", "keep-alive", "It could not be measured.")
    elif server.idle_seconds is None:
        yield _of("well", "keep-alive", f"Idle connections stay for more than {server.watched_seconds:.0f} s.")
    elif server.idle_seconds <= kept:
        why = f"The proxy keeps them for {kept:g} s: requests meet closed connections and are sent twice, or fail."
        less = f"upstream.pool_idle_seconds = {server.idle_seconds / 2:.1f}"
        mend = f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5, or the proxy's {less}"
        yield _of("mend", "keep-alive", f"vLLM closes idle connections after {server.idle_seconds:.1f} s.", why, mend)
    else:
        yield _of("well", "keep-alive", f"Idle connections stay for {server.idle_seconds:.1f} s.")


def _doors(server: Server) -> Iterator[Finding]:
    doors = ", ".join(server.open_paths)
    if server.developer_routes:
        why = "Whoever reaches vLLM may put it to sleep, drop its cache and abort requests."
        yield _of("mend", "developer routes", "They are open.", why, "start vLLM without VLLM_SERVER_DEV_MODE")
    if server.beyond_loopback and server.open_paths:
        key = "without vLLM's key" if server.needs_key else "without a key"
        why = f"{doors} answer {key}: whoever reaches the port has the model, past the proxy."
        yield _of("mend", "open endpoints", "vLLM is reached by more than this machine's loopback.", why,
                  "--uds PATH or --host 127.0.0.1; or a firewall that lets the proxy alone in")  # fmt: skip
    elif server.beyond_loopback is None and server.open_paths:
        why = "Whoever reaches this address has the model, past the proxy; who does cannot be told from here."
        yield _of("note", "open endpoints", f"{doors} answer without a key.", why,
                  "--uds PATH, --host 127.0.0.1 or a network that only the proxy is in")  # fmt: skip
    elif server.open_paths:
        yield _of("well", "open endpoints", f"{doors} take no key, and only this machine reaches them.")
    else:
        yield _of("well", "open endpoints", "None answers without a key.")


def _of(state: State, check: str, says: str, why: str = "", mend: str = "") -> Finding:
    return Finding("vLLM", check, state, says, why, mend)
