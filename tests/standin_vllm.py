"""A program that takes vLLM's command line and is the fake vLLM: what tests of `demo` and `up` start in its place."""

import asyncio
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, from anywhere

from tests.fake_engine import Rules
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm


async def main(arguments: list[str]) -> None:
    """Serve until interrupted."""
    given = dict(pairwise(arguments))
    model = given.get("--served-model-name") or given["serve"]
    fake = FakeVllm(rules=Rules(model=model), block_size=int(given.get("--block-size", 16)))
    fake.unix_path = Path(given["--uds"]) if "--uds" in given else None
    fake.port = int(given.get("--port", 0))
    fake.default = Reply(text="The morning group is the right one for you, because it rides slowly and waits for all.")
    await fake.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
