"""`prefix-proxy plan`: what of a model, its context and its users fits on a card, and the flags for `vllm serve`."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.commands.plan_show import as_json, show
from proxy.config import SettingError
from proxy.core import long_context
from proxy.core.cards import CARDS, GIB, Card, card_of
from proxy.core.model_shape import ModelShape, ShapeError, shape_of
from proxy.core.plan import Fit, Wish, can_share, fit, gpus_needed, most_context

FITS, FITS_NOT = 0, 1
_USUAL_CONTEXT = 32_768
_MOST_CONFIG_BYTES = 4 * 1024 * 1024
_EPILOG = """\
examples:
  prefix-proxy plan ~/models/Qwen2.5-7B-Instruct --gpu 4090 --users 8 --context 16384
  prefix-proxy plan config.json --gpu H100 --gpus 2 --users 40 --context 131072 --kv-cache-dtype fp8
  curl -sL https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/raw/main/config.json | prefix-proxy plan -

exit codes: 0 it fits, 1 it does not, 2 the model or an argument cannot be used.
The figures are estimates, within some percent; vLLM prints its own at the start ("GPU KV cache size").
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One card of the table: what fits there, or how many are needed."""

    card: Card
    found: Fit
    needed: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is told."""

    shape: ModelShape
    checkpoint_bytes: int | None
    wish: Wish | None
    found: Fit | None
    problem: str
    rows: tuple[Row, ...]
    asked: Wish  # what the table is made for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the cards and what is asked of them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL_CONFIG", help="config.json, the model's folder, or - for stdin")
    names = ", ".join(card.name for card in CARDS)
    parser.add_argument("--gpu", metavar="NAME|GiB", help=f"{names}, or its GiB; without it only the table of cards")
    parser.add_argument("--gpus", type=_whole, default=1, metavar="N", help="cards for one vLLM (default: 1)")
    parser.add_argument("--users", type=_whole, default=10, metavar="U", help="chats to keep warm (default: 10)")
    parser.add_argument(
        "--context",
        type=_whole,
        metavar="C",
        help="tokens of a chat, answers included (default: the model's, at most 32768)",
    )
    parser.add_argument("--output", type=_whole, default=2048, metavar="O", help="tokens of an answer (default: 2048)")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.92,
        metavar="S",
        help="vLLM's share of a card (default: 0.92)",
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of keys and values")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if it fits, 1 if not.  Raises SettingError for a model or argument of no use."""
    config, folder = _read(args.model)
    try:
        shape = shape_of(config)
    except ShapeError as error:
        raise SettingError(str(error)) from None
    plan = _plan(shape, args, _checkpoint_bytes(folder, shape))
    print(json.dumps(as_json(plan), indent=2)) if args.json else show(plan)
    return FITS_NOT if plan.problem else FITS


def _plan(shape: ModelShape, args: argparse.Namespace, checkpoint_bytes: int | None) -> Plan:
    context = args.context or min(shape.native_tokens, _USUAL_CONTEXT)
    if args.output >= context:
        raise SettingError(f"--output must be below the context of {context} tokens.")
    card = card_of(args.gpu) if args.gpu else None
    if args.gpu and card is None:
        raise SettingError(f"--gpu is not known: name one of {', '.join(each.name for each in CARDS)}, or its GiB.")
    if not can_share(shape, args.gpus):
        shares = [str(gpus) for gpus in range(1, 17) if can_share(shape, gpus)]
        raise SettingError(f"--gpus {args.gpus} cannot share this model's heads; {', '.join(shares)} can.")
    fp8 = args.kv_cache_dtype == "fp8"
    asked = Wish(CARDS[0], args.gpus, args.users, context, args.output, args.gpu_memory_utilization, fp8)
    rows = tuple(_row(shape, replace(asked, card=each), checkpoint_bytes) for each in CARDS)
    wish = replace(asked, card=card) if card else None
    found = fit(shape, wish, checkpoint_bytes=checkpoint_bytes) if wish else None
    problem = _problem(shape, asked, wish, found, checkpoint_bytes)
    return Plan(shape, checkpoint_bytes, wish, found, problem, rows, asked)


def _row(shape: ModelShape, wish: Wish, checkpoint_bytes: int | None) -> Row:
    found = fit(shape, wish, checkpoint_bytes=checkpoint_bytes)
    needed = wish.gpus if found.starts else gpus_needed(shape, wish, checkpoint_bytes=checkpoint_bytes)
    return Row(wish.card, found, needed)


def _problem(shape: ModelShape, asked: Wish, wish: Wish | None, found: Fit | None, checkpoint_bytes: int | None) -> str:
    """Return in a sentence why vLLM would not start so, and what to do; "" if it would."""
    if asked.context_tokens > shape.native_tokens and not long_context.can_stretch(shape):
        return (
            f"The model's context is {shape.native_tokens:,} tokens and its positions cannot be stretched further: "
            f"use --context {shape.native_tokens}."
        )
    if wish is None or found is None:
        return ""
    if wish.fp8_kv and wish.card.lacks_fp8:
        return f"{wish.card.name} cannot hold keys and values in FP8 (compute capability 8.9 can): leave it out."
    if found.starts:
        return ""
    needed = gpus_needed(shape, wish, checkpoint_bytes=checkpoint_bytes)
    more = f"{needed} such cards would do (--gpus {needed})" if needed else "more than 16 such cards are needed"
    if found.kv_bytes <= 0:
        lacking = f"{-found.kv_bytes / GIB:.1f} GiB a card are lacking for the weights alone"
        smaller = "" if shape.quantization else ", or take a quantised checkpoint (AWQ, FP8)"
        return f"It does not fit: {lacking}; {more}{smaller}."
    longest = most_context(found, wish)
    less = f"one chat may have {longest:,} tokens here (--context {longest})" if longest else "no chat fits here"
    return f"It does not fit: {less}; {more}."


def _read(place: str) -> tuple[Mapping[str, object], Path | None]:
    """Return the config.json at `place`, and its folder where there is one."""
    path = Path(place).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = sys.stdin.buffer.read(_MOST_CONFIG_BYTES) if place == "-" else path.read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or 'it is no file').lower()}.") from None
    try:
        config = json.loads(raw)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise SettingError(f"{'What came' if place == '-' else path} is not the JSON object of a config.json.")
    return config, None if place == "-" else path.parent


def _checkpoint_bytes(folder: Path | None, shape: ModelShape) -> int | None:
    """Return how large the weights beside the configuration are as vLLM holds them; None if that is not told."""
    if folder is None:
        return None
    size: object = None
    with suppress(OSError, ValueError, TypeError, KeyError):
        size = json.loads((folder / "model.safetensors.index.json").read_bytes())["metadata"]["total_size"]
    if not isinstance(size, int) or size <= 0:
        with suppress(OSError):
            size = sum(each.stat().st_size for each in folder.glob("model*.safetensors"))
    if not isinstance(size, int) or size <= 0:
        return None
    return size if shape.quantization else size * shape.number_bytes // shape.stored_bytes


def _whole(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 100_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return share
