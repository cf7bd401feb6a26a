"""What the shell looks up for one request: who asks, about which model, within which limits."""

from collections.abc import Mapping
from dataclasses import replace

from proxy.config import Config
from proxy.core.draft import Facts, Lengths, Template
from proxy.core.identity import Claims, Identity
from proxy.core.pipeline import MOVES_TEXT, PIPELINE
from proxy.core.request import ChatRequest, Received
from proxy.core.salt import salt_for
from proxy.core.text import digest
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
    """Return all that the steps may know of a request; without a session no text moves."""
    config = state.config
    on = {name for name, _ in PIPELINE if config.step_on(name)}
    if session is None or not received.plain or state.templates.refused(model):
        on -= MOVES_TEXT
    moves = bool(on & MOVES_TEXT) and config.profile != "safe"
    salted = salt_for(
        state.secret,
        config.salt.isolation,
        key=caller.name,
        keys=len(config.keys),
        tenant=who.tenant,
        session=session.key.id if session is not None else "",
    )
    return Facts(
        steps=frozenset(on),
        ledger=session.ledger if session is not None else state.no_ledger,
        explicit=who.explicit,
        task=who.task is not None,
        tools=session.tools if session is not None else (),
        tools_order=config.tools.order,
        template=await state.templates.get(model) if moves else Template(),
        lengths=_lengths(state, caller, model),
        salt=salted,
        tags=config.volatile.tags,
        marker=_marker(state, session),
        reasons=model in state.reasoning,
        whitespace_only=config.profile == "safe",
    )


def _lengths(state: State, caller: Caller, model: str) -> Lengths:
    settings = state.config.lengths
    named = settings.models.get(model)
    cap: int | None = named if named is not None else settings.max_output_tokens
    if caller.max_output_tokens is not None:
        cap = caller.max_output_tokens
    elif named is None and model in state.reasoning:
        cap = None
    return Lengths(cap, settings.default_output_tokens, state.models.max_model_len(model))


def _marker(state: State, session: Session | None) -> str:
    """Return the delimiter of notes: nobody outside can compute it, so nobody can forge a note."""
    scope = session.key.id if session is not None else ""
    return "note " + digest(state.secret, b"note", scope.encode()).hex()[:10]
