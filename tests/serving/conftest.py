from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.bundled import BUNDLED_PEAGLE
from peagle.llm import LLM
from serving.collector import Collector, collecting
from serving.live import CHAT_TEMPLATE, KEYS, LOOPING_TEMPLATE, LiveServer, running
from serving.test_metrics import busy_metrics


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the spans of `server` go."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[LiveServer]:
    """The bundled pair with a chat template, for tests that leave it as it is."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    # Both servers live for long, beside whatever else keeps the machine busy.
    options = ("--chat-template", template, "--otlp-endpoint", collector.url)
    options += ("--hang-timeout", 120)
    with running(*options, warm=True, OTEL_BSP_SCHEDULE_DELAY="100") as live:
        yield live


@pytest.fixture(scope="session")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys, limits for each of them, no grammars and a template that can loop."""
    template = tmp_path_factory.mktemp("loop") / "loop.jinja"
    template.write_text(LOOPING_TEMPLATE)
    options = ("--key-requests-per-minute", 5, "--key-tokens-per-minute", 1000)
    options += ("--key-concurrency", 2, "--no-user-grammars", "--grammar-budget", "1e-9")
    options += ("--chat-template", template, "--ignore-priority", "--hang-timeout", 120)
    with running(*options, warm=True, PEAGLE_API_KEY=",".join(KEYS)) as live:
        yield live


@pytest.fixture(scope="session")
def rendered() -> dict[str, set[str]]:
    """Name of every sample that /metrics gives after some traffic -> its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy_metrics().render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same pair in this process."""
    return LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})
