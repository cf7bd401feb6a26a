"""What the shell looks up for one request: who asks, about which model, within which limits."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace

from proxy.config import Config
from proxy.core.draft import DOCUMENT_LEADS, Facts, Lengths, Template, Trim
from proxy.core.identity import Claims, Identity
from proxy.core.pipeline import MOVES_TEXT, PIPELINE
from proxy.core.rehang_task import REHUNG
from proxy.core.request import ChatRequest, Received
from proxy.core.salt import salt_for
from proxy.downstream.auth import Caller
from proxy.downstream.signed import signed_user
from proxy.sessions import Session
from proxy.state import State


def guarded(request: ChatRequest, caller: Caller) -> ChatRequest:
    """Return the request without what may not come from this caller.

    `kv_transfer_params` name other servers to fetch from; `priority` jumps the queue, so that only a trusted caller,
    whose operator sets it in Open WebUI, may give one.
    """
    gone = {"kv_transfer_params"} if caller.trusted else {"kv_transfer_params", "priority"}
    if not gone & request.rest.keys():
        return request
    return replace(request, rest={key: value for key, value in request.rest.items() if key not in gone})


def claims_of(config: Config, caller: Caller, headers: Mapping[str, str]) -> Claims:
    """Return what a caller says of itself, in the headers that the settings name."""
    names = config.identity
    user = signed_user(headers.get(names.jwt_header), names.jwt_secret)
    return Claims(
        caller.name,
        caller.authenticated,
        caller.trusted,
        user=headers.get(names.user_header, ""),
        chat=headers.get(names.chat_header, ""),
        message=headers.get(names.message_header, ""),
        task=headers.get(names.task_header, ""),
        signed_user=user,
    )


def model_of(state: State, request: ChatRequest) -> str:
    """Return the model asked for; vLLM serves its first one where none is named."""
    name = request.rest.get("model")
    if isinstance(name, str) and name:
        return name[:256]
    return next(iter(state.models.names()), "")


async def facts_of(
    state: State, caller: Caller, who: Identity, model: str, session: Session | None, received: Received
) -> Facts:  # fmt: skip
    """Return all that the steps may know of a request; without a session no text moves but a task's."""
    config = state.config
    on = _steps(state, who, model, session, received)
    asks = bool(on & MOVES_TEXT) and config.profile != "safe"
    template = await state.templates.get(model) if asks else Template()
    ranked = "rank" in on and who.task is not None and state.templates.takes_priority(model)
    facts = Facts(
        steps=frozenset(on),
        ledger=state.no_ledger,
        explicit=who.explicit,
        task=who.task is not None,
        task_name=who.task or "",
        takes_priority=ranked,
        tools_order=config.tools.order,
        template=template,
        lengths=_lengths(state, caller, who, model),
        salt=_salt(state, caller, who, model, session),
        tags=config.volatile.tags,
        leads=(*DOCUMENT_LEADS, *config.history.document_leads),
        thinking=config.history.thinking and template.thinking_in_history,
        marker=_marker(state, session),
        reasons=model in state.reasoning,
        trim=Trim(config.trim.low_share, config.trim.pinned_turns, config.trim.gap_text if config.trim.gap else None),
        image_tokens=state.counter.per_image(model),
        whitespace_only=config.profile == "safe",
    )
    if session is not None:
        return _of_session(state, who, session, facts)
    key = state.sessions.key_of(who, model) if "rehang_task" in on and who.explicit else None
    return facts if key is None else replace(facts, chats=state.chats.of(key))


def _of_session(state: State, who: Identity, session: Session, facts: Facts) -> Facts:
    return replace(
        facts,
        ledger=session.ledger,
        tools=session.tools,
        tool_list=session.tool_list,
        cut=session.cut_at,
        lines=session.lines if who.explicit else None,
        patterns=state.learning.patterns(session.key.tenant) if state.config.profile == "max" else (),
    )


def _steps(state: State, who: Identity, model: str, session: Session | None, received: Received) -> set[str]:
    """Return the names of the steps that run: those that are on, without a session no text moves but a task's."""
    on = {name for name, _ in PIPELINE if state.config.step_on(name)}
    if who.task not in REHUNG or state.vllm.crowded:
        on -= {"rehang_task"}
    if not received.plain or state.templates.refused(model):
        return on - MOVES_TEXT
    return on - (MOVES_TEXT - {"rehang_task"}) if session is None else on


def _salt(state: State, caller: Caller, who: Identity, model: str, session: Session | None) -> str | None:
    """Return the salt; a task has its chat's, whose cached prompt it may go on with."""
    config = state.config
    key = session.key if session is not None else state.sessions.key_of(who, model)
    return salt_for(
        state.secret,
        config.salt.isolation,
        key=caller.name,
        keys=len(config.keys),
        tenant=who.tenant,
        session=key.id if key is not None else "",
    )


def _lengths(state: State, caller: Caller, who: Identity, model: str) -> Lengths:
    settings = state.config.lengths
    named = settings.models.get(model)
    cap: int | None = named if named is not None else settings.max_output_tokens
    own = settings.users.get(who.tenant.rpartition("\x00")[2]) if who.proven else None
    if own is not None or caller.max_output_tokens is not None:
        cap = own if own is not None else caller.max_output_tokens
    elif named is None and model in state.reasoning:
        cap = None
    size = state.models.max_model_len(model)
    return Lengths(cap, settings.default_output_tokens, size, settings.max_prompt_tokens)


def _marker(state: State, session: Session | None) -> str:
    """Return the delimiter of notes: nobody outside can compute it, so nobody can forge a note."""
    scope = session.key.id if session is not None else ""
    return "note " + hmac.new(state.secret, f"note\x00{scope}".encode(), hashlib.sha256).hexdigest()[:16]
