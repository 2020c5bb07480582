"""A small dataset and the tiny target, for tests of stored features."""

from pathlib import Path

import pytest
import torch

from peagle.data.dataset import ResponseDataset
from peagle.models.target import TargetModel
from tests.data.files import make_dataset


@pytest.fixture
def dataset() -> ResponseDataset:
    return make_dataset()


@pytest.fixture(scope="session")
def model(target_folder: Path) -> TargetModel:
    return TargetModel.load(target_folder, dtype=torch.float32)
