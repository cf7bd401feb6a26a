"""Which requests count as those of a foreign page."""

import pytest
from aiohttp import hdrs, web
from aiohttp.test_utils import make_mocked_request

from proxy.config import Config, Key
from proxy.core.reject import Reject
from proxy.downstream.origin import refuse_foreign_pages
from tests.conftest import StartProxy


def admitted(config: Config, **headers: str) -> bool:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request: web.Request = make_mocked_request(hdrs.METH_POST, "/", headers=fields)
    try:
        refuse_foreign_pages(request, config)
    except Reject as reject:
        assert (reject.status, reject.code) == (403, "forbidden")
        return False
    return True


OPEN = Config()
KEYED = Config(keys=(Key("k", "sha256$00$00"),))
NAMED = Config().with_values({"listen.allow_hosts": ("proxy.lan",)})


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9000", "LOCALHOST.", "127.0.0.1:9000", "127.9.9.9", "[::1]:9000"]
)
def test_names_of_this_machine_are_ours(host: str) -> None:
    assert admitted(OPEN, Host=host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "192.0.2.1", "a@localhost", "localhost:x", "[::1", "localhost/x"],
)
def test_other_names_are_refused_without_keys_and_left_to_the_key_with_them(host: str) -> None:
    assert not admitted(OPEN, Host=host)
    assert admitted(KEYED, Host=host)


def test_a_configured_name_is_ours() -> None:
    assert admitted(NAMED, Host="Proxy.lan:9000") and not admitted(OPEN, Host="proxy.lan:9000")


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:9000", "localhost:9000"),
        ("http://LOCALHOST", "localhost:80"),
        ("https://proxy.lan", "proxy.lan"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_an_origin_with_our_host_and_port_is_ours(origin: str, host: str) -> None:
    assert admitted(NAMED, Host=host, Origin=origin)


@pytest.mark.parametrize(
    "origin",
    ["null", "", "file://", "http://localhost:9001", "http://evil.example", "ftp://localhost:9000", "localhost:9000"],
)
def test_any_other_origin_is_refused_with_and_without_keys(origin: str) -> None:
    assert not admitted(OPEN, Host="localhost:9000", Origin=origin)
    assert not admitted(KEYED, Host="localhost:9000", Origin=origin)


@pytest.mark.parametrize(
    ("site", "good"), [("none", True), ("same-origin", True), ("same-site", False), ("cross-site", False)]
)
def test_what_the_browser_says_of_the_site_counts(site: str, good: bool) -> None:
    assert admitted(OPEN, Host="localhost", Sec_Fetch_Site=site) is good


async def test_a_page_cannot_post_text_blindly_while_there_are_no_keys(start_proxy: StartProxy) -> None:
    """A form or text/plain needs no preflight; JSON, a program without Origin and an allowed origin pass."""
    proxy = await start_proxy(cors__origins=("https://ui.example",))
    body, text = b'{"messages":[{"role":"user","content":"hi"}]}', {"Content-Type": "text/plain"}
    seen = {}
    for name, headers in {
        "evil": {**text, "Origin": "https://evil.example"},
        "allowed": {**text, "Origin": "https://ui.example"},
        "program": text,
        "json": {"Content-Type": "application/json", "Origin": "https://evil.example"},
    }.items():
        async with proxy.session.post(proxy.url + "/v1/chat/completions", data=body, headers=headers) as answer:
            seen[name] = answer.status
    assert seen == {"evil": 403, "allowed": 200, "program": 200, "json": 200}
