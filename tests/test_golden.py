"""Golden cases, one file each in tests/golden: requests of one chat in turn, and what goes up for each."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.core.draft import Facts, Lengths, Template
from proxy.core.keep_tools import tool_digests
from proxy.core.ledger import Ledger
from proxy.core.request import parse_body
from proxy.core.splice import splice
from tests.trimming import answered
from tests.wire import MARKER, STEPS

CASES = sorted((Path(__file__).parent / "golden").glob("*.json"))


def facts_of(case: dict[str, Any], ledger: Ledger, tools: tuple[bytes, ...]) -> Facts:
    """Return the facts of a case: every step on, the chat named, unless it says otherwise."""
    given = case.get("facts", {})
    return Facts(
        frozenset(given.get("steps", STEPS)),
        ledger,
        explicit=given.get("explicit", True),
        tools=tools,
        tools_order=given.get("tools_order", "session"),
        template=Template(**given.get("template", {"system_in_place": True, "users_in_a_row": True})),
        lengths=Lengths(**given.get("lengths", {})),
        salt=given.get("salt"),
        marker=MARKER,
    )


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_golden_case(path: Path) -> None:
    """Each request goes up as the file says, value for value; a case may give bytes instead, as text."""
    case = json.loads(path.read_text())
    ledger = Ledger(1 << 20)
    tools: tuple[bytes, ...] = ()
    for turn in case["turns"]:
        raw = turn["told"] if isinstance(turn["told"], str) else json.dumps(turn["told"])
        received = parse_body(raw.encode(), max_messages=100, max_images=10)
        done, _ = answered(received.request, facts_of(case, ledger, tools))
        sent = splice(received, done.request).decode()
        assert done.failed == ()
        if isinstance(turn["sent"], str):
            assert sent == turn["sent"]
        else:
            assert json.loads(sent) == turn["sent"]
            assert [list(m) for m in json.loads(sent)["messages"]] == [list(m) for m in turn["sent"]["messages"]]
        node, tools = ledger.record(done.records), tool_digests(done.request.rest) or tools
        if "generated" in turn:
            ledger.add_reply(node, turn["generated"], cut=turn.get("cut", False))


def test_there_are_cases() -> None:
    """Each has a title, and each request an expectation."""
    assert len(CASES) >= 8
    for path in CASES:
        case = json.loads(path.read_text())
        assert case["title"] and all("told" in turn and "sent" in turn for turn in case["turns"])
