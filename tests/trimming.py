"""A chat and a counter for tests of trimming: tokens by a rule that anybody can check by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from proxy.core.counting import Question
from proxy.core.draft import Facts, Lengths, Template, Trim
from proxy.core.ledger import Ledger
from proxy.core.pipeline import PIPELINE, Rewritten, rewrite
from proxy.core.request import ChatRequest, Message
from proxy.core.text import calls_of, text_of

STEPS = frozenset(name for name, _ in PIPELINE)


def t1(messages: Sequence[Message], tools: int = 0, generation: bool = True) -> int:
    """Count 4 a message, 1 a word, 5 a tool call, 100 an image, 10 a tool, 3 for the generation prompt."""
    total = 0
    for message in messages:
        content = message.get("content")
        images = sum(part.get("type") == "image_url" for part in content) if isinstance(content, list) else 0
        total += 4 + len(text_of(message).split()) + 5 * len(calls_of(message)) + 100 * images
    return total + 10 * tools + (3 if generation else 0)


def counted(question: Question) -> int:
    """Answer a question of the core as vLLM would, were it to count by `t1`."""
    tools = question.rest.get("tools")
    return t1(question.messages, len(tools) if isinstance(tools, list) else 0, question.generation)


def facts_for(size: int, *, low: float = 1.0, ledger: Ledger | None = None, **more: object) -> Facts:
    """Return facts of a model with `size` tokens of context, nothing reserved but what a request asks for."""
    facts = Facts(
        steps=STEPS - {"salt", "rank"},
        ledger=ledger or Ledger(1 << 22),
        explicit=True,
        template=Template(system_in_place=True),
        lengths=Lengths(max_model_len=size),
        trim=Trim(low_share=low, gap_text=None),
    )
    return replace(facts, **more)  # type: ignore[arg-type]  # by name


def answered(
    request: ChatRequest, facts: Facts, count: Callable[[Question], int] = counted
) -> tuple[Rewritten, list[Question]]:
    """Run the pipeline as the shell does, counting what it asks for; return its answer and all that was asked."""
    asked: list[Question] = []
    counts: Mapping[bytes, int] = {}
    for _ in range(50):
        done = rewrite(request, replace(facts, counts=counts))
        if not done.questions:
            return done, asked
        asked += done.questions
        counts = {**counts, **{question.key: count(question) for question in done.questions}}
    raise AssertionError("the pipeline never had enough")
