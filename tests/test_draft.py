"""A request taken apart and put together again; what of it the ledger is to remember."""

from proxy.core.draft import DOCUMENT_LEADS, PART, Draft, Entry, Facts, begins_with_block, records_of
from proxy.core.ledger import Ledger
from proxy.core.request import Message
from proxy.core.text import message_digest
from tests.wire import LEAD

USER = {"role": "user", "content": "hi"}
NOTE = {"role": "system", "content": "10:00"}


def entry(note: Message | None = None) -> Entry:
    """Return a user's entry."""
    return Entry(USER, message_digest(USER), USER, note=note)


def test_a_note_goes_in_front_of_its_message() -> None:
    """As a system message, or as a text part before the words."""
    assert entry().wire() == (USER,)
    assert entry(note=NOTE).wire() == (NOTE, USER)
    (sent,) = entry(note={**NOTE, "role": PART}).wire()
    assert sent == {"role": "user", "content": [{"type": "text", "text": "10:00"}, {"type": "text", "text": "hi"}]}
    assert USER == {"role": "user", "content": "hi"}


def test_a_request_is_head_then_messages() -> None:
    """And every other field."""
    draft = Draft((NOTE,), (entry(), entry(note=NOTE)), {"a": 1})
    assert draft.request().messages == (NOTE, USER, NOTE, USER) and draft.request().rest == {"a": 1}
    assert draft.with_entry(0, entry(note=NOTE)).entries[0].note == NOTE and draft.entries[0].note is None


def test_what_is_sent_as_it_was_told_is_kept_as_a_digest() -> None:
    """Text is kept only where it differs, or where its front may vanish."""
    block = {"role": "user", "content": f"{LEAD}x\n</context>\n\nQ"}
    told = Entry(block, message_digest(block), block)
    plain, kept, noted = records_of(Draft((), (entry(), told, entry(note=NOTE)), {}), DOCUMENT_LEADS)
    assert plain.sent is None and not plain.keeps and plain.followed
    assert kept.sent is not None and kept.keeps and kept.followed
    assert noted.sent is not None and not noted.keeps and not noted.followed


def test_a_message_opens_as_machines_do_or_not() -> None:
    """Leads of the settings, or a known element."""
    for text in (LEAD, "<context>\n", "<source id=1>", "<attached_files>\n", "MINE: x"):
        assert begins_with_block({"role": "user", "content": text}, (*DOCUMENT_LEADS, "MINE"))
    contents: list[object] = ["Look: <context>", "", None, 3, []]
    for odd in contents:
        assert not begins_with_block({"role": "user", "content": odd}, DOCUMENT_LEADS)


def test_facts_by_default_allow_nothing_private() -> None:
    """The careful form of everything that is not known."""
    facts = Facts(frozenset(), Ledger(0))
    assert not facts.explicit and not facts.template.system_in_place and facts.salt is None
