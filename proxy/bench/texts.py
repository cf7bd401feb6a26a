"""Text of a wanted length that is the same for the same seed: documents, questions, memories, tools."""

import random
from collections.abc import Mapping, Sequence

_TOKENS_PER_WORD = 1.25  # with the marks between them, in English
_TEXT = """
about above after again air also animal answer around away back because before began being below between both
bridge build came change children city close country course cover cross does door early earth enough every
example family farm feet few field find first follow food form found friend garden give good great group grow
hand hard head help here high home house idea important keep kind land large last late learn leave letter life
light line list little live long machine make market mean might mile morning mountain move much music near
never night north number often open order other page paper part people picture place plan plant point power
question read really right river road room school science second seem sentence side small song soon sound
south spell stand start state still stop story street study system table take talk their there thing think
through time together town tree under until walk watch water white while wind winter without word work world
write year young
"""
_WORDS = tuple(_TEXT.split())
_TOOL_DESCRIPTION_TOKENS = 55
_TOOL_PARAMETERS = 4


def prose(seed: str, tokens: int) -> str:
    """Return about that many tokens of sentences, in paragraphs."""
    dice = random.Random(seed)
    left = int(tokens / _TOKENS_PER_WORD)
    sentences: list[str] = []
    while left > 0:
        words = [dice.choice(_WORDS) for _ in range(min(left, dice.randint(6, 14)))]
        left -= len(words)
        end = ".\n\n" if len(sentences) % 6 == 5 else ". "
        sentences.append(f"{' '.join(words).capitalize()}{end}")
    return "".join(sentences).strip()


def question(seed: str) -> str:
    """Return a question of some ten words."""
    dice = random.Random(seed)
    return f"What do you know of {' '.join(dice.choice(_WORDS) for _ in range(6))}, in two sentences?"


def tool_list(seed: str, count: int) -> Sequence[Mapping[str, object]]:
    """Return that many tools of some 690 bytes each, as Open WebUI lists its own."""
    return [_tool(f"{seed} {number}", f"tool_{number}") for number in range(count)]


def _tool(seed: str, name: str) -> Mapping[str, object]:
    parameters = {
        f"argument_{number}": {"type": "string", "description": prose(f"{seed} {number}", 12)}
        for number in range(_TOOL_PARAMETERS)
    }
    function = {
        "name": name,
        "description": prose(seed, _TOOL_DESCRIPTION_TOKENS),
        "parameters": {"type": "object", "properties": parameters, "required": ["argument_0"]},
    }
    return {"type": "function", "function": function}
