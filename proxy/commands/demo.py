"""`prefix-proxy demo`: a real vLLM on this machine's CPU answers one chat twice, straight and through the proxy."""

import argparse
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from rich.console import Console

from proxy.demo import chat, needs, recipe, server
from proxy.demo.chat import Line, Turn
from proxy.demo.screen import Screen, Summary, table

CANNOT_RUN_HERE = 2
FAILED = 1
INTERRUPTED = 130
USUAL_PORT = 9000  # as `serve` has it: Open WebUI remembers the URL
POLL_SECONDS = 0.5
MODEL = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the demo."""
    parser.add_argument("--once", action="store_true", help="end after the table instead of leaving the servers up")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder for what is installed, about 2.8 GB (default: prefix-proxy in $XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--port", type=_port, metavar="P", help=f"port of the proxy (default: {USUAL_PORT}, or any if that is taken)"
    )
    parser.add_argument(
        "--profile",
        choices=("off", "safe", "balanced", "max"),
        default="balanced",
        help="what the proxy may rewrite (default: balanced)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0, 1 if a server or the chat failed, 2 if vLLM cannot run here, 130 if stopped early."""
    _end_in_order()
    screen = Screen(Console())
    try:
        return _run(args, screen)
    except needs.Missing as error:
        return _say(screen, str(error), CANNOT_RUN_HERE)
    except (server.ServerFailed, chat.ChatFailed, OSError) as error:
        return _say(screen, f"The demo failed: {error}", FAILED)
    except KeyboardInterrupt:
        return _say(screen, "Stopped.", INTERRUPTED)


def _run(args: argparse.Namespace, screen: Screen) -> int:
    needs.check_machine()
    cache = args.cache or recipe.default_cache()
    if args.port is not None and not server.is_free(args.port):
        return _say(screen, f"Port {args.port} is taken by another program.", FAILED)
    environment = recipe.ensure(cache, report=screen)
    port = args.port or (USUAL_PORT if server.is_free(USUAL_PORT) else server.free_port())
    with ExitStack() as stack:
        vllm = stack.enter_context(server.vllm(environment, log=_log(cache, "vllm")))
        with screen.waiting("vLLM starts with SmolLM2-135M-Instruct") as waiting:
            vllm.wait_ready(waiting=waiting)
        proxy = stack.enter_context(server.proxy(vllm.url, log=_log(cache, "proxy"), port=port, profile=args.profile))
        with screen.waiting("The proxy starts") as waiting:
            proxy.wait_ready(waiting=waiting, limit_seconds=30)
        _compare(screen, vllm.url, proxy.url)
        if args.once:
            return 0
        return _leave_up(screen, (vllm, proxy))


def _compare(screen: Screen, vllm_url: str, proxy_url: str) -> None:
    """Tell the chat on both ways and print the table.

    Straight first, under a salt of its own (vLLM shares cached blocks only between equal salts), so that neither way
    finds anything that the other has left.  Through the proxy it is told with the header by which Open WebUI names
    the chat.
    """
    with screen.waiting("A first answer, to warm up"):
        warm_up = Line(f"{vllm_url}/v1", MODEL, {}, {"cache_salt": "warm-up"})
        chat.play(warm_up, questions=chat.QUESTIONS[:1])
    ways = {
        "Straight to vLLM": Line(f"{vllm_url}/v1", MODEL, {}, {"cache_salt": "straight"}),
        "Through the proxy": Line(f"{proxy_url}/v1", MODEL, {"X-OpenWebUI-Chat-Id": str(uuid.uuid4())}, {}),
    }
    told = [_tell(screen, way, line) for way, line in ways.items()]
    screen.console.print()
    screen.console.print(table(*told))
    before, after = (Summary.of(turns) for turns in told)
    screen.console.print(
        f"Turns 2 to {len(chat.QUESTIONS)}: without the proxy {before.cached_share:.0%} of the prompt came from the "
        f"cache, with it {after.cached_share:.0%}.",
        highlight=False,
    )


def _tell(screen: Screen, way: str, line: Line) -> list[Turn]:
    with screen.waiting(f"{way}: {len(chat.QUESTIONS)} turns") as waiting:

        def told(_number: int, _turn: Turn) -> None:
            waiting()

        return chat.play(line, told=told)


def _leave_up(screen: Screen, children: Sequence[server.Child]) -> int:
    """Keep both servers up until Ctrl-C; return 0 then, 1 if one of them ends by itself."""
    vllm, proxy = children
    screen.console.print(
        f"\nBoth servers stay up.  In Open WebUI (Admin Panel > Settings > Connections > OpenAI API) enter\n\n"
        f"    [bold]{proxy.url}/v1[/bold]    (any key; model {MODEL})\n\n"
        f"vLLM itself: {vllm.url}/v1   logs: {proxy.log}, {vllm.log}\nCtrl-C stops both.",
        highlight=False,
        soft_wrap=True,
    )
    try:
        while True:
            for child in children:
                if not child.running:
                    return _say(
                        screen, f"{child.name} ended by itself: {child.last_error()} (The log is {child.log}.)", FAILED
                    )
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        screen.console.print("\nStopping both servers.")
        # The servers are being stopped: a second Ctrl-C must not leave one of them behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 0


def _log(cache: Path, name: str) -> Path:
    """Name a log file of this run; two demos at once write into different ones."""
    return (
        cache.expanduser().absolute() / "logs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}.log"
    )


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 1 to 65535")
    return port


def _say(screen: Screen, sentence: str, code: int) -> int:
    screen.close()
    screen.console.print(
        sentence, style="bold red" if code in (FAILED, CANNOT_RUN_HERE) else None, highlight=False, markup=False
    )
    return code


def _end_in_order() -> None:
    """Let Ctrl-C, a polite end and a closed terminal all stop the servers.

    SIGINT is named because a shell's background jobs begin with it ignored; under nohup SIGHUP stays ignored.
    """
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
