"""Fields that are refused before any work: each by name, with a sentence that one can act on."""

from typing import Any

import pytest

from proxy.core.check_fields import check_n, check_other
from proxy.core.reject import Reject


@pytest.mark.parametrize("n", [0, -1, True, "2", 1.0, [], {}, 9, 10**30])
def test_n_is_a_whole_number_up_to_the_limit(n: Any) -> None:
    """One request must not ask for a hundred answers."""
    with pytest.raises(Reject) as caught:
        check_n({"n": n}, 8)
    assert (caught.value.status, caught.value.param) == (400, "n")


@pytest.mark.parametrize("rest", [{}, {"n": None}, {"n": 1}, {"n": 8}])
def test_what_is_within_the_limit_passes(rest: dict[str, Any]) -> None:
    """null is absent."""
    check_n(rest, 8)


def test_a_stored_response_is_not_gone_on_with() -> None:
    """Its id is all that one would need to read another's conversation."""
    with pytest.raises(Reject) as caught:
        check_other({"previous_response_id": "resp_1"}, 8)
    assert caught.value.param == "previous_response_id"
    check_other({"previous_response_id": None, "input": "x"}, 8)


@pytest.mark.parametrize("field", ["input", "messages"])
def test_long_lists_of_messages_are_refused_by_name(field: str) -> None:
    """As on the chat route."""
    with pytest.raises(Reject) as caught:
        check_other({field: [{}] * 9}, 8)
    assert caught.value.param == field
    check_other({field: [{}] * 8}, 8)
