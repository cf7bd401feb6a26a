"""A document that stands earlier in the prompt becomes a pointer to it, and a text again where its target is gone."""

from proxy.core.documents import AS_BEFORE, POINTER
from proxy.core.request import Message
from tests.wire import TEMPLATES, Wire

RULES = "### Task:\nRespond to the user query using the provided context, " + "citing it " * 30
LONG = "The harbour opens at dawn. " * 8
ONE = f'<source id="1" name="a.txt">{LONG}</source>'
TWO = f'<source id="2" name="b.txt">{LONG[::-1]}</source>'


def told(question: str, *sources: str) -> Message:
    """Return a question as Open WebUI tells it with documents."""
    return {"role": "user", "content": f"{RULES}\n<context>\n" + "\n".join(sources) + f"\n</context>\n\n{question}"}


def model(text: str) -> Message:
    return {"role": "assistant", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def chat() -> Wire:
    wire = Wire(TEMPLATES[1])
    wire.send([told("when?", ONE)])
    wire.answered(model("at dawn"))
    return wire


def test_the_same_document_is_pointed_to_and_the_first_question_stays_whole() -> None:
    sent = chat().send([user("when?"), model("at dawn"), told("sure?", ONE)])
    assert sent[0] == told("when?", ONE)
    assert sent[2]["content"] == (f'{AS_BEFORE}\n<context>\n<source id="1">{POINTER}</source>\n</context>\n\nsure?')


def test_a_new_document_is_told_in_full_beside_a_pointer() -> None:
    content = str(chat().send([user("when?"), model("at dawn"), told("both?", ONE, TWO)])[2]["content"])
    assert TWO in content and ONE not in content and content.count(POINTER) == 1


def test_what_was_sent_as_a_pointer_stays_one() -> None:
    wire = chat()
    second = wire.send([user("when?"), model("at dawn"), told("sure?", ONE)])
    wire.answered(model("yes"))
    third = wire.send([user("when?"), model("at dawn"), user("sure?"), model("yes"), told("really?", ONE)])
    assert third[:3] == second and POINTER in str(third[4]["content"])


def test_an_edit_that_takes_the_target_away_puts_the_text_back() -> None:
    """The first question was edited: its document went, and the newest message tells it in full."""
    wire = chat()
    wire.send([user("when?"), model("at dawn"), told("sure?", ONE)])
    wire.answered(model("yes"))
    sent = wire.send([user("edited"), model("at dawn"), user("sure?"), model("yes"), told("really?", ONE)])
    assert sent[0] == user("edited") and sent[4] == told("really?", ONE) and POINTER not in str(sent[:4])


def test_a_users_own_tags_are_never_shortened() -> None:
    """Only what opens as document chats do is a program's."""
    wire = chat()
    typed = user(f"compare\n{ONE}\nwith b")
    assert wire.send([user("when?"), model("at dawn"), typed])[-1] == typed


def test_instructions_that_speak_of_the_tag_are_no_source() -> None:
    rules = RULES + ' (e.g., <source id="1">)'
    first = {"role": "user", "content": f"{rules}\n<context>\n{ONE}\n</context>\n\nq"}
    wire = Wire(TEMPLATES[1])
    wire.send([first])
    wire.answered(model("a"))
    sent = wire.send([user("q"), model("a"), {**first, "content": str(first["content"]).replace("\n\nq", "\n\nr")}])
    assert str(sent[2]["content"]).startswith(AS_BEFORE) and str(sent[2]["content"]).count(POINTER) == 1
