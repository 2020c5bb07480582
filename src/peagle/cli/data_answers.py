"""The common part of `peagle data regenerate` and `peagle data synthesize`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.flags import Flag
from peagle.cli.settings import read_temperatures
from peagle.cli.setup import Setup
from peagle.config import require_writable_file
from peagle.data.readers import tokenizer_sha256
from peagle.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peagle.data.regenerate import RegenerateProgress
    from peagle.data.synthesize import SynthesizeProgress
    from peagle.llm import LLM

_BATCH_ON_GPU = 256  # sequences decoded together; a GPU decodes them at little more than one's cost


def flag_for_answers(flag: Flag) -> Flag:
    """Return a flag with the default or the values of these commands."""
    if flag.key == "sampling.temperature":
        help = "Temperature of sampling, 0 is greedy; of several each question gets one."
        return replace(flag, kind=str, metavar="T,...", help=help, read=read_temperatures)
    if flag.key == "engine.max_num_seqs":
        return replace(flag, default=f"{_BATCH_ON_GPU} on a GPU, else {flag.shown_default}")
    return flag


def check_jsonl(output: Path) -> None:
    """Refuse an output that is not writable, or whose name does not end in .jsonl."""
    if output.suffix != ".jsonl":
        raise UserError(f"--output is {str(output)!r}; expected a name that ends in .jsonl.")
    require_writable_file(output, "--output")


def begin_output(output: Path, deciding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an output as JSON; refuse an output that was begun with others."""
    from peagle.data.regenerate import check_begun

    known = json.loads(json.dumps(deciding, default=str))  # a setting may be no JSON
    check_begun(output, known)
    return known


def load_for_batches(setup: Setup) -> tuple[LLM, dict[str, Any]]:
    """Load the target with large batches on a GPU; return it with facts for the provenance."""
    from peagle.engine.placement import resolve_device

    is_open = setup.settings.value("engine.max_num_seqs") is None
    if is_open and resolve_device(setup.engine.device).type == "cuda":
        setup.engine = replace(setup.engine, max_num_seqs=_BATCH_ON_GPU)
    llm = setup.load()
    from peagle.models.target_facts import precision_of

    return llm, {
        "model": Path(llm.target.name).name,
        "tokenizer_sha256": tokenizer_sha256(llm.target.name, llm.tokenizer),
        "device": llm.target.device,
        "dtype": precision_of(llm.target),
    }


def given_sampling(setup: Setup) -> dict[str, Any]:
    """Return the given sampling values without the seed and n, which is always 1."""
    given = setup.settings.section("sampling")
    return {key: value for key, value in given.items() if key not in ("seed", "n")}


def template_id(chat_template: str | None) -> str | None:
    """Return the identity of a template: its name, or the hash of its file."""
    if chat_template is None or not Path(chat_template).is_file():
        return chat_template
    from peagle.model_folder import sha256_of

    return sha256_of(Path(chat_template))


def answer_speed(progress: RegenerateProgress | SynthesizeProgress) -> float:
    """Return tokens per second."""
    return progress.tokens / progress.seconds if progress.seconds else 0.0


def print_counts(done: RegenerateProgress | SynthesizeProgress, output: Path) -> None:
    """Print what was done as JSON."""
    print(json.dumps(asdict(done) | {"dropped": done.dropped, "output": str(output)}))
