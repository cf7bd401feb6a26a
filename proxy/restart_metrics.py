"""The metric of a vLLM that the proxy runs itself, in the registry of proxy.metrics."""

from prometheus_client import CollectorRegistry, Counter

from proxy.core.endings import CAUSES


class RestartMetrics:
    """How often `prefix-proxy up` had to start vLLM again."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Ends of the vLLM that `prefix-proxy up` runs, each followed by a start, by cause."
        ended = Counter("proxy_vllm_restarts", text, ("cause",), registry=registry)
        self._ended = {cause: ended.labels(cause) for cause in CAUSES}

    def ended(self, cause: str) -> None:
        """Count an end; `cause` is one of proxy.core.endings.CAUSES."""
        self._ended[cause].inc()
