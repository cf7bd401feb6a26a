"""Media URLs: vLLM fetches them, so only data: and named hosts pass (case SC-10)."""

from typing import Any

import pytest

from proxy.core.images import check_media, check_urls
from proxy.core.reject import Reject

DATA = "data:image/png;base64,AAAA"


def part(url: Any, kind: Any = "image_url", bare: bool = False) -> dict[str, Any]:
    """Return a content part with a URL."""
    name = kind if isinstance(kind, str) else "image_url"
    return {"type": kind, name: url if bare else {"url": url}}


def check(*parts: Any, hosts: tuple[str, ...] = ()) -> None:
    """Check one message of text and these parts."""
    check_urls([{"role": "user", "content": "x"}, {"role": "user", "content": list(parts)}], hosts)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "audio_url", "video_url"])
def test_a_foreign_url_is_refused_by_its_place(kind: str) -> None:
    """Whatever it carries, as an object or bare."""
    for bare in (True, False):
        with pytest.raises(Reject) as caught:
            check(part(DATA, kind, bare), part("http://10.0.0.1/x", kind, bare))
        assert (caught.value.status, caught.value.param) == (400, f"messages[1].content[1].{kind}")
        assert "10.0.0.1" not in caught.value.message


def test_data_urls_pass() -> None:
    """In any case of letters."""
    check(part(DATA), part("DATA:,x"), part(DATA, "video_url", bare=True))


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "ftp://ok.example/x",
        "https://ok.example.evil/x",
        "https://evil/ok.example",
        "https://ok.example@evil/x",
        "https://evil\\@ok.example/x",
        "//ok.example/x",
        "ok.example/x",
        "http://[::1/x",
        "http://",
        "",
        " data:,x",
        "javascript:1",
    ],
)
def test_only_the_named_host_passes(url: str) -> None:
    """By its whole name, http or https."""
    check(part("https://ok.example/x"), part("http://OK.example:8080/x"), hosts=("ok.example",))
    with pytest.raises(Reject):
        check(part(url), hosts=("ok.example",))


def test_a_part_without_a_type_or_with_an_odd_one_is_looked_at_all_the_same() -> None:
    """vLLM infers the type of a part that has none, and of any part that has a `uuid`."""
    by_field = {"uuid": "u", "image_url": {"url": "http://x/"}}
    odd_types = [{"type": kind, **by_field} for kind in ("text", "image_embeds", "IMAGE_URL", "image_pil")]
    for odd in ({"image_url": {"url": "http://x/"}}, {"type": None, "image_url": "http://x/"}, *odd_types):
        with pytest.raises(Reject):
            check(odd)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"url": None}, {"url": 3}])
def test_what_is_no_url_is_left_to_vllm(value: Any) -> None:
    """It refuses it itself."""
    check({"type": "image_url", "image_url": value}, {"type": "text", "text": "http://x/"}, "http://x/", None)


def test_other_contents_have_no_urls() -> None:
    """Text that speaks of one is text."""
    check_urls([{"role": "user", "content": "http://x/"}, {"role": "user"}, {"role": "user", "content": 3}], ())


def deep(value: Any, levels: int) -> Any:
    """Return a value under so many lists and objects."""
    for i in range(levels):
        value = [value] if i % 2 else {"x": value}
    return value


@pytest.mark.parametrize("levels", [0, 1, 98])
@pytest.mark.parametrize("name", ["image_url", "audio_url", "video_url", "file_url"])
def test_a_source_is_found_wherever_it_stands(name: str, levels: int) -> None:
    """On the routes whose bodies have other shapes, and without recursion."""
    for url in ("http://10.0.0.1/", {"url": "file:///x"}):
        with pytest.raises(Reject) as caught:
            check_media({"input": deep({name: url}, levels)}, ("ok.example",), 64)
        assert str(caught.value.param).startswith("input") and str(caught.value.param).endswith(name)
    check_media({"input": deep({name: "https://ok.example/x"}, levels)}, ("ok.example",), 64)
    check_media({"input": deep({name: DATA}, levels)}, (), 64)


def test_the_sources_of_other_routes_are_counted_too() -> None:
    """More than a chat request may have are refused."""
    source = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    check_media({"messages": [{"content": [source] * 3}]}, (), 3)
    with pytest.raises(Reject, match="at most 2"):
        check_media({"messages": [{"content": [source] * 3}]}, (), 2)
