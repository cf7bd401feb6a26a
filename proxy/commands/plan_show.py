"""How `prefix-proxy plan` tells its plan: in lines and a table, or as JSON."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.core import long_context
from proxy.core.cards import GIB
from proxy.core.model_memory import kv_cost, parameters_of, weight_bytes
from proxy.core.model_shape import ModelShape
from proxy.core.plan_flags import Advice, flags, settings

if TYPE_CHECKING:
    from proxy.commands.plan import Plan, Row

_COLUMNS = ("card", "GiB", "weights", "KV GiB", "KV tokens", "warm chats", "cards needed")


def as_json(plan: "Plan") -> Mapping[str, object]:
    """Return the plan as one object; bytes and tokens as whole numbers."""
    shape, wish, found = plan.shape, plan.wish, plan.found
    out: dict[str, object] = {
        "model": _model_json(plan),
        "asked": {
            "users": plan.asked.users,
            "context_tokens": plan.asked.context_tokens,
            "output_tokens": plan.asked.output_tokens,
            "gpus": plan.asked.gpus,
            "gpu_memory_utilization": plan.asked.utilization,
            "kv_cache_dtype": "fp8" if plan.asked.fp8_kv else "auto",
        },
        "problem": plan.problem or None,
        "cards": [_row_json(row) for row in plan.rows],
    }
    if wish is not None and found is not None:
        out["plan"] = {
            "card": wish.card.name,
            "memory_bytes": wish.card.memory_bytes,
            "weights_bytes": found.weights_bytes,
            "runtime_bytes": found.runtime_bytes,
            "kv_bytes": max(0, found.kv_bytes),
            "kv_tokens": found.kv_tokens,
            "chat_bytes": found.chat_bytes,
            "warm_chats": found.warm_chats,
            "flags": [_advice_json(each) for each in flags(shape, wish, found)] if not plan.problem else [],
            "settings": [_advice_json(each) for each in settings(wish)],
        }
    return out


def _model_json(plan: "Plan") -> Mapping[str, object]:
    shape = plan.shape
    cost = kv_cost(shape, fp8=plan.asked.fp8_kv)
    return {
        "architecture": shape.architecture,
        "parameters": parameters_of(shape).total,
        "weights_bytes": plan.checkpoint_bytes or weight_bytes(shape),
        "weights_from": "estimate" if plan.checkpoint_bytes is None else "files",
        "quantization": shape.quantization.method if shape.quantization else None,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_width,
        "kv_bytes_per_token": cost.token_bytes,
        "kv_bytes_per_token_in_windows": cost.token_bytes - cost.full_bytes,
        "native_context_tokens": shape.native_tokens,
        "hf_overrides": long_context.overrides(shape, plan.asked.context_tokens),
    }


def _row_json(row: "Row") -> Mapping[str, object]:
    return {
        "card": row.card.name,
        "memory_bytes": row.card.memory_bytes,
        "weights_bytes": row.found.weights_bytes,
        "kv_bytes": max(0, row.found.kv_bytes),
        "kv_tokens": row.found.kv_tokens if row.found.starts else 0,
        "warm_chats": row.found.warm_chats,
        "cards_needed": row.needed,
    }


def _advice_json(advice: Advice) -> Mapping[str, str]:
    return {"text": advice.text, "reason": advice.reason}


def show(plan: "Plan") -> None:
    """Print it for people; a table where there is a terminal, else lines with tabs."""
    for line in [*_model_lines(plan), *_fit_lines(plan)]:
        print(line)
    print()
    _print_table(plan)
    if plan.problem:
        print(f"\n{plan.problem}")
        return
    for line in _advice_lines(plan):
        print(line)


def _model_lines(plan: "Plan") -> Iterator[str]:
    shape = plan.shape
    size = plan.checkpoint_bytes or weight_bytes(shape)
    told = "by their shapes" if plan.checkpoint_bytes is None else "by the files"
    method = f", {shape.quantization.method}" if shape.quantization else ""
    yield (
        f"{_printable(shape.architecture)}: {parameters_of(shape).total / 1e9:.2f} B parameters, "
        f"{size / GIB:.1f} GiB of weights {told}{method}"
    )
    yield f"keys and values: {_kv(shape, fp8=plan.asked.fp8_kv)}"
    yield f"context: {plan.asked.context_tokens:,} tokens, the model's own is {shape.native_tokens:,}"


def _kv(shape: ModelShape, *, fp8: bool) -> str:
    cost = kv_cost(shape, fp8=fp8)
    if shape.latent is not None:
        made = f"a latent vector of {shape.latent.kv_rank} + {shape.latent.rope_width}"
    else:
        made = f"{shape.kv_heads} heads of {shape.head_width}"
    told = f"{cost.token_bytes:,} bytes a token ({shape.layers} layers, {made}{', fp8' if fp8 else ''})"
    parts = [f"{size:,} of it only for the last {window:,} tokens" for window, size in cost.windowed]
    return ", ".join([told, *parts])


def _fit_lines(plan: "Plan") -> Iterator[str]:
    wish, found = plan.wish, plan.found
    if wish is None or found is None or plan.problem:
        return
    cards = f"{wish.gpus} x {wish.card.name}" if wish.gpus > 1 else wish.card.name
    yield (
        f"{cards}: of {wish.card.memory_gib:g} GiB {'each ' if wish.gpus > 1 else ''}vLLM takes "
        f"{wish.card.memory_gib * wish.utilization:.1f}: weights {found.weights_bytes / GIB:.1f}, "
        f"its own {found.runtime_bytes / GIB:.1f}, keys and values {found.kv_bytes / GIB:.1f}"
    )
    warm = (
        f"{found.kv_tokens:,} tokens of keys and values: {found.warm_chats} chats of {wish.context_tokens:,} stay warm"
    )
    yield f"{warm}, all of {wish.users}" if found.warm_chats >= wish.users else f"{warm} of {wish.users}"


def _print_table(plan: "Plan") -> None:
    asked = plan.asked
    title = f"Chats of {asked.context_tokens:,} tokens on {asked.gpus} card{'s' if asked.gpus > 1 else ''}"
    rows = [_cells(row) for row in plan.rows]
    if not sys.stdout.isatty():
        print(title, "\t".join(_COLUMNS), *("\t".join(row) for row in rows), sep="\n")
        return
    table = Table(title=title, box=box.SIMPLE)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "card" else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _cells(row: "Row") -> tuple[str, ...]:
    found = row.found
    room = f"{found.kv_bytes / GIB:.1f}" if found.kv_bytes > 0 else "-"
    tokens, chats = (f"{found.kv_tokens:,}", f"{found.warm_chats:,}") if found.starts else ("-", "-")
    needed = str(row.needed) if row.needed else "> 16"
    return row.card.name, f"{row.card.memory_gib:g}", f"{found.weights_bytes / GIB:.1f}", room, tokens, chats, needed


def _advice_lines(plan: "Plan") -> Iterator[str]:
    if plan.wish is None or plan.found is None:
        yield "\nWith --gpu this also prints the flags for vLLM."
        return
    found = flags(plan.shape, plan.wish, plan.found)
    yield "\nvllm serve MODEL \\\n    " + " \\\n    ".join(each.text for each in found)
    yield ""
    yield from (f"{_name(each.text)}: {each.reason}" for each in found)
    if 0 < plan.found.warm_chats < plan.wish.users and not (plan.wish.fp8_kv or plan.wish.card.lacks_fp8):
        yield "--kv-cache-dtype fp8 would keep twice as many chats warm, at some loss of precision."
    yield "\nSettings of the proxy:"
    yield from (f"    {each.text}    # {each.reason}" for each in settings(plan.wish))
    yield "`prefix-proxy template check` says whether the model's chat template keeps the prefix."


def _name(flag: str) -> str:
    return " ".join(word for word in shlex.split(flag) if word.startswith("--"))


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:80]
