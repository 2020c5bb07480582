"""Sizes of models on the hub, before they are deployed; of weights only the headers are read."""

from __future__ import annotations

from peagle.deploy.memory import ModelFacts, model_facts
from peagle.deploy.model_files import HubFiles, unseen_is_told
from peagle.deploy.models import ModelSource


def facts_of_hub(source: ModelSource) -> ModelFacts | None:
    """Sizes of a model on the hub; None for others.

    None, too, with a warning, where the hub does not answer or has no safetensors of it: the
    container may well be able to.
    """
    if source.kind == "hub":
        with unseen_is_told(source, "The model"):
            files = HubFiles(source)
            return model_facts(files.config(), files.tensors())
    return None
