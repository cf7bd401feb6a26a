"""Step `clamp_lengths`: output lengths within what the server was sized for, in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from proxy.core.draft import Draft, Facts, Lengths
from proxy.core.meter import Meter
from proxy.core.reject import Reject


def clamp_lengths(draft: Draft, facts: Facts) -> Draft:
    """Check `max_tokens` and `max_completion_tokens`, lower them to the cap, and give a default where both are absent.

    Raises Reject 400 naming the field for 0, a negative or anything that is no whole number.  `max_expected_tokens`
    is a hint for the proxy and never goes up.  A request is never given more than it asked for.
    """
    hint(draft.rest)
    rest = {key: value for key, value in draft.rest.items() if key != "max_expected_tokens"}
    limit = _within_room(limit_of(facts.lengths), draft, facts)
    asked = {field: whole(rest[field], field) for field in facts.lengths.fields if rest.get(field) is not None}
    if not asked:
        rest = _with_default(rest, facts.lengths, limit)
    elif limit is not None:
        effective = next(iter(asked.values()))
        for field, value in asked.items():
            bound = min(limit, effective)
            if value > bound and (field == next(iter(asked)) or value > limit):
                rest[field] = bound
    return draft if rest == draft.rest and rest.keys() == draft.rest.keys() else replace(draft, rest=rest)


def _within_room(limit: int | None, draft: Draft, facts: Facts) -> int | None:
    """Return the limit lowered to the room that the prompt leaves, which vLLM would do too, but silently.

    Where it matters `trim_history` has counted exactly.
    """
    size = facts.lengths.max_model_len
    if size is None or draft.counted is None or not draft.exact:
        return limit
    room = max(1, size - draft.counted)
    return room if limit is None else min(limit, room)


def limit_of(lengths: Lengths) -> int | None:
    """Return the most tokens of an answer; vLLM refuses more than `max_model_len` and clamps to the room left."""
    known = [value for value in (lengths.cap, lengths.max_model_len) if value is not None]
    return min(known, default=None)


def given_limit(asked: Mapping[str, object], sent: Mapping[str, object], fields: Sequence[str]) -> int | None:
    """Return the limit of an answer, in tokens, where the proxy gave or lowered it; None where the client's holds."""
    limit, own = _effective(sent, fields), _effective(asked, fields)
    return None if limit is None or limit == own else int(limit)


def ended_at(limit: int | None, meter: Meter) -> bool:
    """Say whether an answer ended at `limit`, and not before it for want of room."""
    if limit is None or meter.finish_reason != "length":
        return False
    return meter.usage is None or meter.usage.completion_tokens >= limit


def _effective(rest: Mapping[str, object], fields: Sequence[str]) -> float | None:
    value = next((rest[field] for field in fields if rest.get(field) is not None), None)
    return value if isinstance(value, int | float) else None


def _with_default(rest: dict[str, object], lengths: Lengths, limit: int | None) -> dict[str, object]:
    wanted = lengths.default_output if lengths.default_output is not None else lengths.cap
    nulls = [field for field in lengths.fields if field in rest]
    if wanted is None or lengths.max_model_len is None:  # a number above max_model_len would be refused by vLLM
        return {key: value for key, value in rest.items() if key not in nulls}
    value = wanted if limit is None else min(wanted, limit)
    rest = {key: old for key, old in rest.items() if key not in nulls}
    return {**rest, lengths.fields[-1]: value}


def whole(value: object, field: str) -> int:
    """Return a token limit as a whole number above 0; raises Reject 400 naming `field` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        _refuse(field, "a whole number of tokens")
    if value < 1:
        _refuse(field, "at least 1; leave it out for no limit of your own")
    return int(value)


def _refuse(field: str, what: str) -> NoReturn:
    raise Reject(400, f"'{field}' must be {what}.", param=field, code="invalid_value")


def hint(rest: Mapping[str, object]) -> int | None:
    """Return `max_expected_tokens`, the client's hint of how long the answer will be; None where it gave none."""
    value = rest.get("max_expected_tokens")
    return None if value is None else whole(value, "max_expected_tokens")
