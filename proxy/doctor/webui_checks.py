"""What is to be said of a running Open WebUI.  Pure: a `WebUI` in, findings and wanted headers out."""

from collections.abc import Iterator, Mapping

from proxy.config.groups import Identity
from proxy.doctor.finding import Finding, State, printable
from proxy.doctor.webui import Connection, WebUI

_CUSTOM_HELP = "Admin Panel > Settings > Connections > Headers"


def judge_webui(webui: WebUI, *, proxy: str) -> list[Finding]:
    """Return what every check says; `proxy` is the address that a connection should have."""
    if webui.problem:
        mend = "--openwebui-key with an admin's API key or token" if webui.version else "the address of --openwebui"
        return [_of("failed", "reachable", webui.problem, mend=mend)]
    reached = _of("well", "reachable", f"Open WebUI {printable(webui.version or '', 40)}.")
    if webui.connections is None:
        says = "Its settings are shown to an admin only."
        return [reached, _of("failed", "settings", says, mend="--openwebui-key with an admin's API key or token")]
    return [
        reached,
        *_connections(webui.connections, proxy),
        *_names(webui),
        *_tasks(webui),
        *_documents(webui),
        *_timeouts(),
    ]


def wanted_headers(webui: WebUI) -> Mapping[int, Mapping[str, str]]:
    """Return, by place, all headers of each connection to the proxy that lacks some of them now."""
    wanted = {}
    for each in webui.connections or ():
        lacking = _lacking(each, users=webui.names_users is not True)
        if each.to_proxy and lacking:
            wanted[each.place] = {**each.headers, **lacking}
    return wanted


def _lacking(connection: Connection, *, users: bool) -> Mapping[str, str]:
    """Return the headers that are not sent yet; Open WebUI fills in the values with each request."""
    names = Identity()
    should = {names.message_header: "{{MESSAGE_ID}}", names.task_header: "{{TASK}}"}
    if users:
        should |= {names.user_header: "{{USER_ID}}", names.chat_header: "{{CHAT_ID}}"}
    sent = {name.lower(): value for name, value in connection.headers.items()}
    return {name: value for name, value in should.items() if value not in sent.get(name.lower(), "")}


def _connections(connections: tuple[Connection, ...], proxy: str) -> Iterator[Finding]:
    for each in connections:
        if each.to_vllm:
            why = "What goes straight to vLLM is not rewritten, and drives the proxy's chats out of the cache."
            yield _of("mend", "connection", f"Connection {each.place} goes straight to vLLM.", why,
                      f"{proxy}/v1 as its URL, and a key of the proxy")  # fmt: skip
        elif each.to_proxy and each.works is False:
            yield _of("mend", "connection", f"Open WebUI gets no models at {printable(each.url, 100)}.",
                      "All models of this connection are missing in the picker.",
                      "the proxy's address as Open WebUI's host sees it, and a key of the proxy")  # fmt: skip
        elif each.to_proxy:
            yield _of("well", "connection", f"Connection {each.place} goes to the proxy.")
    if not any(each.to_proxy or each.to_vllm for each in connections):
        yield _of("mend", "connection", "No connection goes to the proxy.", "Nothing of it reaches the proxy.",
                  f"{proxy}/v1 under Connections; or --proxy with the proxy's address, if it is another")  # fmt: skip


def _names(webui: WebUI) -> Iterator[Finding]:
    ours = [each for each in webui.connections or () if each.to_proxy]
    for each in ours:
        lacking = _lacking(each, users=False)
        if lacking:
            why = "Without them the same answer is computed twice where one was asked for, and tasks are guessed."
            yield _of("mend", "message and task", f"Not named on connection {each.place}.", why,
                      f"{_shown(lacking)} under {_CUSTOM_HELP}")  # fmt: skip
        else:
            yield _of("well", "message and task", "Named by custom headers.")
        missing = {name: value for name, value in _lacking(each, users=True).items() if name not in lacking}
        if webui.names_users or not missing:
            yield _of("well", "user and chat", "Named by Open WebUI.")
            continue
        why = "A chat is then found by its content only: its documents and memory do not come back, nothing is joined."
        seen = "not named" if webui.names_users is False else "not named by this connection's headers"
        shown = _shown(missing)
        mend = f"ENABLE_FORWARD_USER_INFO_HEADERS=true in its environment; or {shown} under {_CUSTOM_HELP}"
        yield _of("mend", "user and chat", f"They are {seen}.", why, mend)


def _tasks(webui: WebUI) -> Iterator[Finding]:
    model = webui.tasks.get("TASK_MODEL_EXTERNAL")
    if not webui.tasks:
        yield _of("note", "task model", "Not to be seen.")
    elif model:
        why = "Only tasks of the chat's own model reuse its cache; a small model on another server is fine too."
        yield _of("note", "task model", f"Tasks go to {printable(str(model), 80)}.", why,
                  "TASK_MODEL_EXTERNAL empty (Admin Panel > Settings > Interface)")  # fmt: skip
    else:
        yield _of("well", "task model", "Tasks go to the chat's own model.")
    if webui.tasks.get("ENABLE_AUTOCOMPLETE_GENERATION"):
        why = "Every pause in typing is a request with a prompt of its own; the proxy lets only the last one through."
        yield _of("note", "autocompletion", "It is on.", why, "off, under Admin Panel > Settings > Interface")


def _documents(webui: WebUI) -> Iterator[Finding]:
    template = webui.documents.get("RAG_TEMPLATE")
    if isinstance(template, str) and template.strip() and "<context>" not in template:
        why = "The proxy knows a document's block by <context>; without it each turn with documents is computed anew."
        yield _of("mend", "document template", "It has no <context> element.", why,
                  "the default template; or its first line in the proxy's history.document_leads")  # fmt: skip
    hidden = "RAG_SYSTEM_CONTEXT is not to be seen from outside."
    if webui.documents.get("RAG_FULL_CONTEXT") or webui.documents.get("BYPASS_EMBEDDING_AND_RETRIEVAL"):
        why = "Whole documents then stand in the system message, the same in every turn, and need not be moved."
        mend = "RAG_SYSTEM_CONTEXT=true in its environment"
        yield _of("note", "documents", f"Whole documents are sent; {hidden}", why, mend)
    elif webui.documents:
        why = "With it the parts that are found would change the system message with every turn."
        mend = "RAG_SYSTEM_CONTEXT=false, which is the default"
        yield _of("note", "documents", f"Parts of documents are sent; {hidden}", why, mend)


def _shown(headers: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": "{value}"' for name, value in headers.items()) + "}"


def _timeouts() -> Iterator[Finding]:
    why = "A limit on whole answers ends long ones, and chats that wait in line; the proxy has its own limits."
    yield _of("note", "timeouts", "Not to be seen from outside.", why, "AIOHTTP_CLIENT_TIMEOUT unset: no limit")


def _of(state: State, check: str, says: str, why: str = "", mend: str = "") -> Finding:
    return Finding("Open WebUI", check, state, says, why, mend)
