"""Sampling parameters and model facts, as OpenAI's interface and ours write them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from peagle.config import SamplingParams, StructuredOutput

# A request has no field for these, or the answer has no place for them here.
_OMITTED_FIELDS = ("n", "logprobs", "prompt_logprobs", "num_speculative_tokens")


def sampling_fields(params: SamplingParams, names: Iterable[str]) -> dict[str, Any]:
    """Return the named parameters as fields of a request; the server chooses the others."""
    fields = {name: getattr(params, name) for name in names if name not in _OMITTED_FIELDS}
    if bias := fields.pop("logit_bias", None):
        # JSON has no infinity; -100 is what OpenAI's interface calls a ban.
        fields["logit_bias"] = {str(token): max(value, -100.0) for token, value in bias}
    if (structure := fields.pop("structured_output", None)) is not None:
        fields["response_format"] = _response_format(structure)
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(structure: StructuredOutput) -> dict[str, Any]:
    if structure.kind == "json":
        return {"type": "json_object"}
    if structure.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(structure.source), "strict": True}
        return {"type": "json_schema", "json_schema": schema}
    kind, field = {"regex": ("regex", "pattern"), "ebnf": ("grammar", "grammar")}[structure.kind]
    return {"type": kind, field: structure.source}


def served_drafts(facts: Mapping[str, Any]) -> int | None:
    """Return K of a model's default proposer from the facts that its server lists.

    0 means that it drafts nothing, None that the server is not `peagle serve`.
    """
    speculation = facts.get("speculation")
    if not isinstance(speculation, Mapping):
        return None
    proposers = [one for one in speculation.get("proposers", ()) if isinstance(one, Mapping)]
    by_name = {one.get("name"): one for one in proposers}
    return int(by_name.get(speculation.get("default"), {}).get("num_speculative_tokens", 0))
