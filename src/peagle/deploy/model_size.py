"""Sizes of models on the hub, before they are deployed; of weights only the headers are read."""

from __future__ import annotations

from collections.abc import Iterator

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
            return model_facts(HubFiles(source).config(), _tensors(source))
    return None


def _tensors(source: ModelSource) -> Iterator[tuple[str, str, int]]:
    """Name, type and bytes of every tensor."""
    from huggingface_hub import HfApi

    from peagle.models.hub import no_telemetry
    from peagle.models.hub_upload import hub_url

    with no_telemetry():
        metadata = HfApi(endpoint=hub_url()).get_safetensors_metadata(
            source.name, revision=source.revision
        )
    for file in metadata.files_metadata.values():
        for name, tensor in file.tensors.items():
            begin, end = tensor.data_offsets
            yield name, tensor.dtype, end - begin
