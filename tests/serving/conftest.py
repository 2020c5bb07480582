from __future__ import annotations

from collections.abc import Iterator

import pytest

from peagle.bundled import BUNDLED_PEAGLE
from peagle.llm import LLM
from serving.live import CHAT_TEMPLATE, LiveServer, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled pair with a chat template, for tests that leave it as it is."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    with running("--chat-template", template) as live:
        yield live


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same pair in this process."""
    return LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})
