from __future__ import annotations

from collections.abc import Iterator

import pytest

from peagle.bundled import BUNDLED_PEAGLE
from peagle.llm import LLM
from serving.collector import Collector, collecting
from serving.live import CHAT_TEMPLATE, LiveServer, running


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
    options = ("--chat-template", template, "--otlp-endpoint", collector.url)
    with running(*options, OTEL_BSP_SCHEDULE_DELAY="100") as live:
        yield live


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same pair in this process."""
    return LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})
