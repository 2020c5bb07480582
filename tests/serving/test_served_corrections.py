"""A server whose requests choose among corrections of its head."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE
from serving.live import CHAT_TEMPLATE, LiveServer, running
from tests.corrections import perturbed_correction

K = 5
PROMPT = "def fibonacci(n):\n    a, b = 0, 1\n"
COMPLETION = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 40, "temperature": 0}
RESPONSE = {"input": "def f(", "max_output_tokens": 40, "temperature": 0}
ROUTES = {"completions": COMPLETION, "chat/completions": CHAT, "responses": RESPONSE}


@pytest.fixture(scope="module")
def sql(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed_correction(BUNDLED_PEAGLE, tmp_path_factory.mktemp("sql") / "sql.st", 0)


@pytest.fixture(scope="module")
def live(sql: Path) -> Iterator[LiveServer]:
    template = sql.parent / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    options = ("-k", K, "--correction", f"sql={sql}", "--correction", f"web={sql}")
    options += ("--dtype", "float32", "--chat-template", template, "--hang-timeout", 120)
    with running(*options, warm=True) as server:
        yield server


def ask(live: LiveServer, route: str, correction: str | None) -> Any:
    body = {**ROUTES[route], "speculation": {"report": True, "correction": correction}}
    with live.client() as client:
        return client.post(f"/v1/{route}", json=body)


@pytest.mark.slow
def test_requests_draft_with_the_correction_that_they_name(live: LiveServer, sql: Path) -> None:
    """All at once; completions as offline."""
    cases = [(route, name) for route in ROUTES for name in (None, "sql", "web")]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(live, *case).json()["usage"], cases))
    found = dict(zip(cases, (answer["speculation"] for answer in answers), strict=True))
    for route in ROUTES:
        assert found[route, "sql"] == found[route, "web"] != found[route, None]
    config = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": K}
    llm = LLM(speculative_config={**config, "corrections": {"sql": sql}}, dtype="float32")
    for name in (None, "sql"):
        params = SamplingParams(max_tokens=40, correction=name)
        (output,) = llm.generate([PROMPT], params)
        assert found["completions", name]["num_accepted_tokens"] == output.stats.num_accepted_tokens
    (proposer, *others) = live_model(live)["speculation"]["proposers"]
    assert proposer["corrections"] == ["sql", "web"]
    assert all("corrections" not in other for other in others)


def live_model(live: LiveServer) -> dict[str, Any]:
    with live.client() as client:
        return client.get("/v1/models").json()["data"][0]


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_unknown_names_are_refused_with_the_known_ones(live: LiveServer, route: str) -> None:
    answer = ask(live, route, "slq")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "speculation.correction"
    assert "speculation.correction is 'slq'; expected one of: sql, web" in error["message"]
    body = {**ROUTES[route], "speculation": {"proposer": "eagle3", "correction": "sql"}}
    with live.client() as client:
        other = client.post(f"/v1/{route}", json=body)
        body = {**ROUTES[route], "speculation": {"proposer": "plain", "correction": "slq"}}
        plain = client.post(f"/v1/{route}", json=body)
    assert "expected none: eagle3 has no --correction" in other.json()["error"]["message"]
    assert plain.status_code == 400 and "one of: sql, web" in plain.json()["error"]["message"]
