"""A mix of requests: some requests of a benchmark have further sampling parameters.

    [{"every": 4, "sampling": {"repetition_penalty": 1.1}},
     {"every": 8, "sampling": {"logprobs": 5}}]

One request in four gets a penalty, one in eight log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.settings import sampling_values
from peagle.config import SamplingParams
from peagle.config.checks import did_you_mean
from peagle.errors import UserError
from peagle.model_folder import parse_json

if TYPE_CHECKING:
    from peagle.evaluation.decoding import Request

_EXAMPLE = '[{"every": 4, "sampling": {"repetition_penalty": 1.1}}]'
# A request of a benchmark has one output, and the benchmark sets K.
_UNSUPPORTED_FIELDS = ("n", "num_speculative_tokens", "prompt_logprobs")
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name not in _UNSUPPORTED_FIELDS)


@dataclass(frozen=True, slots=True)
class Share:
    """Sampling parameters for one request in `every`; `entry` has them as written."""

    every: int
    sampling: Mapping[str, Any]
    entry: Mapping[str, Any]


def read_mix(path: Path) -> list[Share]:
    """Read the shares of a mix from a JSON file.

    Raises:
        UserError: the file cannot be read or is no mix; the error names the entry and the field.
    """
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--mix: {str(path)!r} is not readable: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"--mix: {str(path)!r} is not JSON: {error}.") from None
    if not isinstance(data, list) or not data:
        raise UserError(f"--mix: {str(path)!r} holds {data!r}; expected a list, like {_EXAMPLE}.")
    return [_share(entry, f"--mix: entry {number}") for number, entry in enumerate(data, 1)]


def _share(entry: Any, where: str) -> Share:
    if not isinstance(entry, dict) or set(entry) != {"every", "sampling"}:
        raise UserError(
            f"{where} is {entry!r}; expected an object with every and sampling, like "
            f"{_EXAMPLE[1:-1]}."
        )
    every, sampling = entry["every"], entry["sampling"]
    if type(every) is not int or every < 1:
        raise UserError(f"{where}: every is {every!r}; expected a whole number of at least 1.")
    if not isinstance(sampling, dict):
        raise UserError(f"{where}: sampling is {sampling!r}; expected an object.")
    if unknown := [name for name in sampling if name not in _SAMPLING]:
        raise UserError(
            f"{where}: sampling has {unknown[0]!r}; expected some of {', '.join(_SAMPLING)}."
            f"{did_you_mean(unknown[0], _SAMPLING)}"
        )
    try:
        values = sampling_values(sampling)
        SamplingParams(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return Share(every, values, entry)


def apply_mix(requests: Sequence[Request], shares: Sequence[Share]) -> list[Request]:
    """Return the requests with the parameters of their shares.

    Share s takes the requests s, s + every, s + 2 every, ...; a request of several shares gets the
    parameters of all.

    Raises:
        UserError: the parameters of a request contradict each other.
    """
    mixed = list(requests)
    for start, share in enumerate(shares):
        for number in range(start % share.every, len(mixed), share.every):
            request = mixed[number]
            try:
                params = replace(request.params, **share.sampling)
            except UserError as error:
                raise UserError(f"--mix: entry {start + 1}: {error}") from None
            mixed[number] = replace(request, params=params)
    return mixed
