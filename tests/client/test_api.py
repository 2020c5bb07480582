"""The client of servers with OpenAI's interface, against a server that answers from a script."""

import ssl

import pytest

from peagle.client import api
from peagle.client.api import ApiClient, NoAnswer, failure_reason, key_from_environment
from peagle.errors import UserError
from tests.evaluation.fake_endpoint import Script, endpoint


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://x", "http://", "http://h:99999", "http://h/?a=b", "nonsense"),
        *("http://h#x", "http://h:x", "http://user@h", "http://:key@h", "http://[::1"),
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match=r"--server is .*; expected a URL like http"):
        ApiClient(url, option="--server")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_requests_carry_the_key_and_go_below_the_url(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # no call uses a proxy
    script = Script(key="secret")
    with endpoint(script) as url:
        client = ApiClient(f"{url}/base{end}", "secret", headers={"Host": "other"})
        assert client.call("GET", "/v1/models").status == 404
    assert script.paths == ["/base/v1/models"]
    assert script.headers[0]["authorization"] == "Bearer secret"
    assert script.headers[0]["host"] == "other"


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "")
    monkeypatch.setenv("SECOND", "a,b")
    assert key_from_environment("FIRST", "SECOND") == "a"
    assert key_from_environment("FIRST") is None
    for key in ("ké", "a\nHost: b"):
        with pytest.raises(UserError, match="PEAGLE_API_KEY has characters that no key has"):
            ApiClient("http://h", key)


def test_a_wrong_key_is_refused_without_being_shown() -> None:
    with endpoint(Script(key="secret")) as url, pytest.raises(UserError) as caught:
        ApiClient(url, "wrong").models()
    assert "refused the key (401: no such key). Set the variable PEAGLE_API_KEY" in str(
        caught.value
    )
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("listed", ["<html>hello", "[]", '{"data": 3}', '{"data": [{}]}'])
def test_a_list_of_models_that_is_none(listed: str) -> None:
    with endpoint(Script(models=listed)) as url, pytest.raises(UserError, match="not OpenAI's"):
        ApiClient(url).models()


def test_a_server_that_is_not_there() -> None:
    with endpoint(Script()) as url:
        pass
    client = ApiClient(url, option="--server")
    with pytest.raises(NoAnswer, match=f"No server answers at {url}: .*correct --server") as caught:
        client.models()
    assert caught.value.reason == "Connection refused"


def test_a_server_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CONNECT_S", 0.5)
    with endpoint(Script()) as url:
        secure = url.replace("http:", "https:")
        with pytest.raises(NoAnswer, match=f"No server answers at {secure}: ."):
            ApiClient(secure).models()


def test_a_body_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_MAX_BYTES", 10)
    with endpoint(Script()) as url, pytest.raises(NoAnswer, match="broke: a body of more than 10"):
        ApiClient(url).models()


def test_a_body_that_drips() -> None:
    script = Script(stream=["x", 0.2] * 50, content_type="application/json")
    with endpoint(script) as url, pytest.raises(NoAnswer, match="broke: TimeoutError"):
        ApiClient(url, timeout_s=0.5).call("POST", "/v1/completions", {})


def test_a_redirect_is_named() -> None:
    script = Script(models="", models_status=301)
    with (
        endpoint(script) as url,
        pytest.raises(UserError, match=r"redirects \(301\).*--endpoint: name"),
    ):
        ApiClient(url).models()


def test_tls_gives_its_own_reason() -> None:
    error = ssl.SSLCertVerificationError(1, "self-signed certificate")
    assert failure_reason(error) == "self-signed certificate"
