"""Makes a real Open WebUI, and runs it without a network, a stand-in for embeddings beside it."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from proxy.demo import pip, server

PINS = ("torch==2.13.0", "open-webui==0.12.4")
EMBEDDING = [0.05] * 384  # every text is like every other: retrieval returns the first parts of a document

# With these it reaches for nothing outside (but for the connections below) and forwards who asks about what.
SETTINGS = {
    "ANONYMIZED_TELEMETRY": "false",
    "AUDIO_STT_ENGINE": "openai",
    "DO_NOT_TRACK": "true",
    "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_EMBEDDING_MODEL": "stand-in",
    "RAG_EMBEDDING_MODEL_AUTO_UPDATE": "false",
    "RAG_OPENAI_API_KEY": "unused",
    "RAG_RERANKING_MODEL_AUTO_UPDATE": "false",
    "SCARF_NO_ANALYTICS": "true",
    "TRANSFORMERS_OFFLINE": "1",
    "WEBUI_SECRET_KEY": "only for this test",
}
HEADERS = {"X-OpenWebUI-Message-Id": "{{MESSAGE_ID}}", "X-OpenWebUI-Task": "{{TASK}}"}


def ensure(cache: Path) -> Path:
    """Return the Python that has Open WebUI, in a folder of `cache`, made now if it is not there (3 minutes, 3 GB).

    $PREFIX_PROXY_OPENWEBUI may name an environment that has it.  Raises Missing when it cannot be installed.
    """
    named = os.environ.get("PREFIX_PROXY_OPENWEBUI")
    if named:
        return Path(named).absolute() / "bin" / "python"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    root = cache / f"{re.sub('[^a-z0-9.]+', '-', PINS[1])}-py{version}"
    python, stamp, log = root / "venv" / "bin" / "python", root / "complete.json", root / "setup.log"
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock"):
        if not (stamp.exists() and json.loads(stamp.read_text()) == list(PINS) and python.exists()):
            pip.run((sys.executable, "-m", "venv", "--clear", root / "venv"), log, lambda _line: None)
            install = ("-m", "pip", "install", "--no-input", "--progress-bar", "off", "--disable-pip-version-check")
            pip.run((python, *install, *PINS), log, lambda _line: None)
            stamp.write_text(json.dumps(PINS))
    return python


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # Unix only, as the rest of the end-to-end tests

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def open_webui(python: Path, proxy_url: str, embeddings_url: str, folder: Path) -> server.Child:
    """Describe an Open WebUI whose one connection is the proxy, fresh in `folder`; start it with `with`."""
    port = server.free_port()
    data = folder / "data"
    data.mkdir()
    command = [str(python), str(python.with_name("open-webui")), "serve", "--host", server.HOST, "--port", str(port)]
    environ = {**os.environ, **SETTINGS, "DATA_DIR": str(data), "OPENAI_API_BASE_URL": f"{proxy_url}/v1",
               "OPENAI_API_KEY": "unused", "OPENAI_API_CONFIGS": json.dumps({"0": {"headers": HEADERS}}),
               "RAG_OPENAI_API_BASE_URL": f"{embeddings_url}/v1"}  # fmt: skip
    log = folder / "open-webui.log"
    return server.Child("Open WebUI", command, port=port, log=log, environ=environ, ready_path="/health",
                        stop_signal=signal.SIGTERM)  # fmt: skip


class _Embeddings(BaseHTTPRequestHandler):
    """Answers every request for embeddings with the same vector for each text."""

    def do_POST(self) -> None:
        """Answer one request."""
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        count = len(texts) if isinstance(texts, list) else 1
        data = [{"object": "embedding", "index": i, "embedding": EMBEDDING} for i in range(count)]
        body = json.dumps({"object": "list", "model": "stand-in", "data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def embeddings() -> Iterator[str]:
    """Serve embeddings on a port of this machine; yield the URL, without /v1."""
    with ThreadingHTTPServer((server.HOST, 0), _Embeddings) as listening:
        thread = threading.Thread(target=listening.serve_forever, name="embeddings")
        thread.start()
        try:
            yield f"http://{server.HOST}:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()
