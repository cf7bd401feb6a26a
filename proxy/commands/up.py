"""`prefix-proxy up`: vLLM on a socket of its own, the proxy before it, both kept running and stopped together."""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from proxy import logs
from proxy.child import Child
from proxy.commands.serve import loop_factory, serve
from proxy.config import Loaded, SettingError
from proxy.config.flags import add_setting_flags, setting_flags
from proxy.config.load import load_settings
from proxy.config.setting import ENV_PREFIX
from proxy.core.cards import CARDS, card_of
from proxy.core.plan_flags import Advice
from proxy.core.template_check import checked, stable
from proxy.demo.screen import Screen
from proxy.doctor.flags import parse
from proxy.own_template import choose, folder_of
from proxy.starting import Asked, advise, command_of, find_card, find_vllm, read_shape, refuse_what_cannot_be
from proxy.template_verdicts import check_upstream, fitting
from proxy.upkeep import Keeper
from proxy.upstream.client import Upstream
from proxy.upstream.rendering import NoAnswer, UpstreamRenderer

TAKES_REST = True  # what stands after `--` is vLLM's
FAILED = 1
_OURS_LOG = "-"
_MOST_PATH_BYTES = 100  # the system has room for 107
_EPILOG = """\
examples:
  prefix-proxy up Qwen/Qwen2.5-7B-Instruct
  prefix-proxy up ~/models/Qwen3-8B --gpu 4090 --users 8 --port 9000 -- --reasoning-parser qwen3
  prefix-proxy up Qwen/Qwen2.5-7B-Instruct --dry-run --json

What stands after -- goes to vLLM and beats what is planned.  vLLM listens on a socket file that only this user's
programs reach; when it ends it is started again, after 1 second at first and 60 at most.
exit codes: 0 stopped in order, 1 vLLM did not start, 2 a setting or flag that cannot be, 130 or 143 stopped early.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, what is planned for, and the proxy's settings."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "prefix-proxy up MODEL [flags] [-- flags of vllm serve]"
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a model's name, or the folder with its files")
    names = ", ".join(card.name for card in CARDS)
    parser.add_argument("--gpu", metavar="NAME|GiB", help=f"{names}, or its GiB (default: as nvidia-smi says)")
    parser.add_argument("--gpus", type=_whole, default=1, metavar="N", help="cards for it (default: 1)")
    parser.add_argument("--users", type=_whole, default=10, metavar="U", help="chats to keep warm (default: 10)")
    parser.add_argument(
        "--context", type=_whole, metavar="C", help="tokens of a chat (default: the model's, at most 32768)"
    )
    parser.add_argument("--output", type=_whole, default=2048, metavar="O", help="tokens of an answer (default: 2048)")
    parser.add_argument(
        "--vllm-log", metavar="FILE", help="vLLM's log (default: in ~/.local/state/prefix-proxy; -: here)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be started")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    add_setting_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Start both and keep them running until told to stop; return the exit code.  Raises SettingError."""
    if args.json and not args.dry_run:
        raise SettingError("--json goes with --dry-run: the proxy's own log is JSON with log.format.")
    if "upstream.url" in setting_flags(args):
        raise SettingError("Leave --upstream out: `up` starts vLLM itself (`serve` is for one that runs).")
    refuse_what_cannot_be(args.rest)
    program = "vllm" if args.dry_run else find_vllm()
    with tempfile.TemporaryDirectory(prefix="prefix-proxy-") as folder:
        socket = Path(folder, "vllm.sock")
        if len(os.fsencode(socket)) > _MOST_PATH_BYTES:
            raise SettingError("The folder of TMPDIR has too long a name for a socket file in it: set a shorter one.")
        advice, notes = _prepare(args)
        command = command_of(program, args.model, socket, advice, args.rest)
        if args.dry_run:
            return _show(args, command, advice, notes)
        for note in notes:
            print(note, flush=True)
        return _run(args, command, socket)


def _prepare(args: argparse.Namespace) -> tuple[Sequence[Advice], Sequence[str]]:
    """Return what vLLM should be started with, and the sentences on it."""
    card = card_of(args.gpu) if args.gpu else find_card()
    if args.gpu and card is None:
        raise SettingError(f"--gpu is not known: name one of {', '.join(each.name for each in CARDS)}, or its GiB.")
    folder = folder_of(args.model)
    asked = Asked(card, args.gpus, args.users, args.context, args.output)
    advice, note = advise(args.model, read_shape(folder), asked)
    notes = [note]
    if folder is not None and "chat-template" not in parse(args.rest).flags:
        chosen = choose(folder)
        notes.append(chosen.says)
        if chosen.path is not None:
            path = shlex.quote(str(chosen.path))
            advice = [*advice, Advice(f"--chat-template {path}", "the model's own is not prefix-stable")]
    return advice, notes


def _show(args: argparse.Namespace, command: Sequence[str], advice: Sequence[Advice], notes: Sequence[str]) -> int:
    if args.json:
        reasons = [{"text": each.text, "reason": each.reason} for each in advice]
        print(json.dumps({"command": list(command), "advice": reasons, "notes": list(notes)}, indent=2))
        return 0
    for note in notes:
        print(note)
    print(shlex.join(command))
    for each in advice:
        print(f"  {each.text.split()[0]}: {each.reason}")
    return 0


def _run(args: argparse.Namespace, command: Sequence[str], socket: Path) -> int:
    loaded = load_settings({**setting_flags(args), "upstream.url": f"unix:{socket}"})
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    log = None if args.vllm_log == _OURS_LOG else Path(args.vllm_log or _usual_log(args.model)).expanduser().absolute()
    keeper = Keeper(Child(command, environ, log, socket), lambda sentence: print(sentence, flush=True))
    logs.configure(loaded.config.log)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_up(args, loaded, keeper))


def _usual_log(model: str) -> Path:
    """Name the log after the model: two that run at once write into two files."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "prefix-proxy" / f"vllm-{re.sub(r'[^A-Za-z0-9.]+', '-', Path(model).name)[:60]}.log"


async def _up(args: argparse.Namespace, loaded: Loaded, keeper: Keeper) -> int:
    child = keeper.child
    try:
        stopped_by = await _first_start(args, loaded, keeper)
        if stopped_by is not None:
            return stopped_by
        await serve(loaded, beside=keeper.beside)
        return 0
    finally:
        # Who tells us twice to stop does not want to wait for vLLM's last answers.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, child.kill)
        await child.stop()


async def _first_start(args: argparse.Namespace, loaded: Loaded, keeper: Keeper) -> int | None:
    """Start vLLM and wait for it; return an exit code if it ended or we were told to stop, None if it is ready."""
    told: list[int] = []

    def stop(number: int) -> None:
        told.append(number)
        if len(told) == 1:
            keeper.child.ask()
        else:
            keeper.child.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await keeper.child.start()
    except OSError as error:
        raise SettingError(f"vLLM cannot be started: {(error.strerror or 'it is no program').lower()}.") from None
    if told:  # while it was being started, when there was nothing to ask yet
        keeper.child.ask()
    screen, upstream = Screen(Console(stderr=True)), Upstream(loaded.config.upstream)
    try:
        log = keeper.child.log
        print(f"vLLM's log: {log}" if log else "vLLM logs here.", flush=True)
        screen.step(f"vLLM starts with {args.model}")
        ending = await keeper.wait_ready(upstream.fetch, lambda: screen.line(""))
        screen.close()
        if told:
            return 128 + told[0]
        if ending is not None:
            print(f"prefix-proxy: vLLM ended while it started. {ending.sentence}", file=sys.stderr)
            return FAILED
        await _tell_template(upstream)
        return 128 + told[0] if told else None
    finally:
        screen.close()
        await upstream.close()


async def _tell_template(upstream: Upstream) -> None:
    """Say so where the template that is served now is not stable: of a model whose files were not here before."""
    try:
        found = await check_upstream(UpstreamRenderer(upstream.fetch).render)
    except NoAnswer:
        return
    if checked(found.verdicts) and not stable(found.verdicts):
        ours = await asyncio.to_thread(fitting, found.probed)
        mend = f": `-- --chat-template {ours}` mends it" if ours else ""
        print(f"The chat template that is served is not prefix-stable{mend}.", flush=True)


def _whole(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 100_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
