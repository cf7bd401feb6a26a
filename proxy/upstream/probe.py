"""What the served chat template accepts, asked once a model through vLLM's /tokenize."""

import asyncio
import time

from proxy.aio import Tasks
from proxy.core.draft import Template
from proxy.upstream.vllm import Models, Vllm

WAIT_SECONDS = 1.0
_A = {"role": "system", "content": "Answer in short sentences."}
_B = {"role": "user", "content": "Which river is long?"}
_C = {"role": "assistant", "content": "The Nile is."}
_D = {"role": "system", "content": "quartz nimbus zebra"}
_E = {"role": "user", "content": "And which is wide?"}
_THOUGHT = {"role": "assistant", "content": "<think>\nquartz nimbus zebra\n</think>\n\nThe Nile is."}
RETRY_SECONDS = 30.0


class Templates:
    """What is known of each model's template.  Unknown or failing: the form that every template takes."""

    def __init__(self, vllm: Vllm, models: Models, tasks: Tasks) -> None:
        self._vllm, self._models, self._tasks = vllm, models, tasks
        self._known: dict[str, tuple[int, Template]] = {}
        self._asking: dict[str, asyncio.Task[object]] = {}
        self._refused: dict[str, int] = {}
        self._no_priority: dict[str, int] = {}
        self._silent_until: dict[str, float] = {}  # vLLM did not answer the probe, in monotonic seconds

    async def get(self, model: str) -> Template:
        """Return what `model` accepts; asks on first use and after vLLM was found anew, and waits a second at most."""
        if model not in self._models.known():  # vLLM will say so itself; names from outside are not kept
            model = next(iter(self._models.names()), "")
        known = self._known.get(model)
        if known is not None and known[0] == self._models.generation:
            return known[1]
        if not model or self._silent_until.get(model, 0.0) > time.monotonic():
            return Template()
        task = self._asking.get(model)
        if task is None:
            task = self._asking[model] = self._tasks.spawn(self._ask(model), name="template-probe")
        await asyncio.wait((task,), timeout=WAIT_SECONDS)
        known = self._known.get(model)
        return known[1] if known is not None else Template()

    def takes_priority(self, model: str) -> bool:
        """Say whether a `priority` may be given: vLLM 0.32 ignores it under fcfs, an older one refuses it once."""
        return self._no_priority.get(model) != self._models.generation

    def refuse_priority(self, model: str) -> None:
        """Note that vLLM refused a request for its `priority`."""
        if model in self._models.known():
            self._no_priority[model] = self._models.generation

    def refuse(self, model: str) -> None:
        """Note that vLLM refused what was made for `model`: no text moves until vLLM is found anew."""
        if model in self._models.known():
            self._refused[model] = self._models.generation

    def refused(self, model: str) -> bool:
        """Say whether text may not move for `model` now."""
        return self._refused.get(model) == self._models.generation

    async def _ask(self, model: str) -> None:
        generation = self._models.generation
        try:
            if not await self._tokens(model, [_A, _B, _C]):
                self._silent_until[model] = time.monotonic() + RETRY_SECONDS
                return
            self._known[model] = (
                generation,
                Template(
                    await self._in_place(model),
                    await self._tokens(model, [_A, _B, _E]) is not None,
                    await self._thinks_in_history(model),
                ),
            )
        finally:
            self._asking.pop(model, None)

    async def _thinks_in_history(self, model: str) -> bool:
        """Say whether a think block of an earlier reply is rendered: Qwen3's own template leaves it out."""
        told = await self._tokens(model, [_A, _B, _THOUGHT, _E])
        without = await self._tokens(model, [_A, _B, _C, _E])
        return bool(told and without) and len(told or ()) >= len(without or ()) + 3

    async def _in_place(self, model: str) -> bool:
        """Say whether a system message in the middle is rendered there: each prompt begins with the shorter one."""
        short = await self._tokens(model, [_A, _B, _C])
        middle = await self._tokens(model, [_A, _B, _C, _D])
        whole = await self._tokens(model, [_A, _B, _C, _D, _E])
        if not short or not middle or not whole:
            return False
        return len(middle) >= len(short) + 3 and middle[: len(short)] == short and whole[: len(middle)] == middle

    async def _tokens(self, model: str, messages: list[dict[str, str]]) -> list[int] | None:
        return await self._vllm.tokens({"model": model, "messages": messages, "add_generation_prompt": False})
