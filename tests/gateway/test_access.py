"""Keys, levels of routes, web pages of other origins, and TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from actors import run
from actors.gateway.access import Access, Cors, KeysWrong, Level, read_keys
from actors.gateway.http import App
from actors.gateway.site import access_of
from actors.settings import SettingsError
from messages.config import GatewayConfig
from tests.gateway.street import Street
from tests.gateway.test_site import listening

CERT = str(Path(__file__).parent / "tls" / "cert.pem")
KEY = str(Path(__file__).parent / "tls" / "key.pem")  # made for this test, and of no other use
ADMIN = {"authorization": "Bearer boss"}


def locked(*, metrics_open: bool = False) -> Access:
    return Access(("alpha", "beta"), ("boss",), metrics_open=metrics_open)


@pytest.mark.parametrize(
    ("path", "authorization", "x_api_key", "status"),
    [
        ("/health", None, None, None),
        ("/ready", "Bearer wrong", None, None),
        ("/metrics", None, None, 401),
        ("/v1/models", None, None, 401),
        ("/v1/models", "Bearer beta", None, None),
        ("/v1/models", "bearer  beta ", None, None),
        ("/v1/models", "Basic beta", None, 401),
        ("/v1/models", "Bearer ", None, 401),
        ("/v1/models", "Bearer alph", None, 401),
        ("/v1/models", "Bearer alphaa", None, 401),
        ("/v1/models", "Bearer ALPHA", None, 401),
        ("/v1/models", "Bearer \xe9", None, 401),
        ("/v1/models", None, "alpha", None),
        ("/v1/models", "Bearer wrong", "alpha", 401),
        ("/v1/models", "Bearer boss", None, None),
        ("/no/such/route", None, None, 401),
        ("/flush_cache", None, None, 401),
        ("/flush_cache", "Bearer alpha", None, 403),
        ("/flush_cache", "Bearer boss", None, None),
        ("/actors/replica/worker/restart", "Bearer alpha", None, 403),
        ("/actors", "Bearer alpha", None, None),
    ],
)
def test_a_key_opens_what_it_is_for(
    path: str, authorization: str | None, x_api_key: str | None, status: int | None
) -> None:
    denied = locked().judge(path, authorization, x_api_key)
    assert (None if denied is None else denied.status) == status


def test_without_keys_all_is_open_but_control() -> None:
    access = Access()
    assert access.judge("/v1/models", None, None) is None
    denied = access.judge("/flush_cache", None, None)
    assert denied is not None and denied.status == 403
    assert Access((), ("boss",)).judge("/flush_cache", "Bearer boss", None) is None


def test_metrics_are_open_by_choice() -> None:
    assert locked(metrics_open=True).level("/metrics") is Level.OPEN
    assert locked().level("/metrics") is Level.KEY


def test_keys_are_read_a_line_or_between_commas() -> None:
    assert read_keys("# ours\nalpha\n\n beta , gamma\n", "x") == ("alpha", "beta", "gamma")


@pytest.mark.parametrize("text", ["", " \n", "# only a remark", "two words", "ключ"])
def test_a_source_without_a_usable_key_is_an_error(text: str) -> None:
    with pytest.raises(KeysWrong):
        read_keys(text, "x")


def test_keys_come_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    monkeypatch.setenv("HISTRIO_API_KEYS", "beta,gamma")
    access = access_of(GatewayConfig(api_key_file=str(file)))
    assert all(access.judge("/", f"Bearer {k}", None) is None for k in ("alpha", "beta", "gamma"))
    monkeypatch.setenv("HISTRIO_API_KEYS", "")
    with pytest.raises(SettingsError):
        run.check_files(GatewayConfig())
    with pytest.raises(KeysWrong):  # an empty secret does not open the house
        access_of(GatewayConfig())


async def test_every_route_is_shut_but_health() -> None:
    street = Street()
    street.app = App(street.gateway, locked())
    for path in sorted(street.app.labels | {"/nowhere"}):
        got = await street.ask(street.request("GET", path))
        if path in ("/health", "/ready"):
            assert got.status == 200
        else:
            assert got.status in (401, 403), path
            assert "error" in got.json()
    got = await street.ask(street.request("GET", "/v1/models"))
    assert got.headers["www-authenticate"] == "Bearer"
    assert got.error()["code"] == "invalid_api_key"
    headers = {"authorization": "Bearer alpha"}
    got = await street.ask(street.request("GET", "/v1/models", headers=headers))
    assert got.status == 200
    street.assert_idle()


async def test_a_page_of_an_allowed_origin_may_ask() -> None:
    street = Street(cors_origins="https://a.example, http://localhost:3000/")
    street.app = App(street.gateway, locked())
    ask = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-custom",
    }
    got = await street.ask(street.request("OPTIONS", "/v1/chat/completions", headers=ask))
    assert got.status == 204 and got.body == b""
    assert got.headers["access-control-allow-origin"] == "https://a.example"
    assert got.headers["access-control-allow-headers"] == "authorization,x-custom"
    assert "POST" in got.headers["access-control-allow-methods"]
    for origin in ("https://a.example", "http://localhost:3000"):
        headers = {"origin": origin, "x-api-key": "beta"}
        got = await street.ask(street.request("GET", "/v1/models", headers=headers))
        assert got.status == 200 and got.headers["access-control-allow-origin"] == origin
    refused = await street.ask(street.request("GET", "/v1/models", headers={"origin": origin}))
    assert refused.status == 401  # the page can read why
    assert refused.headers["access-control-allow-origin"] == origin


def test_a_page_may_read_the_headers_that_are_made_for_clients() -> None:
    for origins in ("*", "https://page.test"):
        headers = dict(Cors(origins).headers("https://page.test"))
        exposed = headers[b"access-control-expose-headers"].decode().split(", ")
        assert {"x-request-id", "request-id", "retry-after", "x-stream-id"} == set(exposed)


async def test_a_page_of_another_origin_learns_nothing() -> None:
    street = Street(cors_origins="https://a.example")
    for method in ("GET", "OPTIONS"):
        ask = {"origin": "https://evil.example", "access-control-request-method": "GET"}
        got = await street.ask(street.request(method, "/v1/models", headers=ask))
        assert "access-control-allow-origin" not in got.headers
    street = Street()
    got = await street.ask(street.request("GET", "/v1/models", headers=ask))
    assert "access-control-allow-origin" not in got.headers and "vary" not in got.headers


async def test_every_origin_may_be_allowed() -> None:
    street = Street(cors_origins="*")
    got = await street.ask(street.request("GET", "/v1/models", headers={"origin": "null"}))
    assert got.headers["access-control-allow-origin"] == "*"


async def test_https_is_served_and_plain_http_is_not() -> None:
    async with listening(tls_cert=CERT, tls_key=KEY) as place:
        trusted = ssl.create_default_context(cafile=CERT)
        async with httpx.AsyncClient(verify=trusted) as client:
            got = await place.until(client.get(f"https://127.0.0.1:{place.port}/v1/models"))
            assert got.status_code == 200 and got.json()["data"][0]["id"] == "M"
            body = {"model": "M", "prompt": "one two", "stream": True}
            url = f"https://127.0.0.1:{place.port}/v1/completions"
            got = await place.until(client.post(url, json=body))
            assert got.text.endswith("data: [DONE]\n\n")
        assert await place.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") == b""


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key_file": "/no/such/file"},
        {"tls_key": KEY},
        {"batch_dir": f"{KEY}/batches"},
        {"tls_cert": KEY},
        {"tls_cert": CERT, "tls_key": "/no/such/file"},
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_starts(
    settings: dict[str, str],
) -> None:
    with pytest.raises(SettingsError):
        run.check_files(GatewayConfig(**settings))
    run.check_files(GatewayConfig(tls_cert=CERT, tls_key=KEY))
