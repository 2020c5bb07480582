"""What the tests of training share."""

from pathlib import Path

import pytest

from tests.training.runs import write_responses


@pytest.fixture(scope="session")
def responses(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses that the tiny target generated, as JSONL."""
    return write_responses(target_folder, tmp_path_factory.mktemp("data") / "responses.jsonl")
