"""A chat that outgrows its context four times over, before a real vLLM."""

import pytest

from proxy.demo import server
from tests.bench_trim import VLLM_CONTEXT, VLLM_TURNS, real_turns, summary
from tests.conftest import StartProxy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("vllm", ["qwen2tiny-small"], indirect=True, scope="session")
async def test_sixty_turns_in_a_small_context_stay_cached_and_counted(
    vllm: server.Child, start_proxy: StartProxy
) -> None:
    """No 400, four fifths from the cache, every count that decided equal to vLLM's usage, estimates within 3 %."""
    proxy = await start_proxy(upstream__url=vllm.url)
    found = summary(await real_turns(proxy.session, proxy.url, VLLM_TURNS))
    assert (found.refused, found.differed) == (0, 0)
    assert found.decided > 0
    assert found.cuts > 0
    assert found.cached >= 0.8
    assert found.off <= 0.03
    assert found.largest < VLLM_CONTEXT
