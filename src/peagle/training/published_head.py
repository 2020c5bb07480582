"""A head that is to be published: its folder, checked, and its model card.

The card says what the head's config.json, its tensors and the record of its training say, and
nothing else: "not recorded" stands for what they leave out. Its template is model_card.md.
"""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import ModelCard, ModelCardData
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from peagle.config import require_folder
from peagle.data.origins import AnswerOrigin
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import (
    CORRECTION_NAME,
    HeadFormat,
    StoredHead,
    read_correction,
    read_head,
)
from peagle.models.checkpoint.files import read_object
from peagle.models.checkpoint.weights import INDEX_NAME, WEIGHTS_NAME
from peagle.models.drafter import DrafterConfig
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.head_json import RECORD_NAME, default_k
from peagle.models.head_quantization import DEFAULT_GROUP, HeadQuantization, StoredQuantization
from peagle.models.hub import DEFAULT_REVISION
from peagle.models.loading import resolve_model

CARD_NAME = "README.md"

_CONFIG_NAME = "config.json"
_TRAINED_NAME = "head"  # of the folder that `peagle train` makes beside train.json
_TEXTS = (_CONFIG_NAME, INDEX_NAME, CARD_NAME, RECORD_NAME, "LICENSE", "LICENSE.txt", "NOTICE")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SECRET_NAME = re.compile(
    r"^\.env|^\.netrc$|^\.?id_(rsa|dsa|ecdsa|ed25519)|\.(pem|key|p12|pfx)$"
    r"|secret|credential|password|^\.?token$",
    re.IGNORECASE,
)
# Tokens of the hub, of OpenAI, of GitHub and of AWS, and private keys.
_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_SHOWN_NAMES = 3


def _at(*path: str) -> Any:
    return Field(default=None, validation_alias=AliasPath(*path))


class TrainRecord(BaseModel):
    """The values of train.json (`Trainer` writes it) that the card uses; None is not recorded.

    The validation belongs to the head that was kept: the best one, in old records the last.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    method: str | None = _at("config", "method", "name")
    depth: int | None = _at("config", "method", "depth")
    loss: str | None = _at("config", "method", "loss")
    quantization: StoredQuantization | None = _at("config", "head", "quantization")
    int8_layers: tuple[str, ...] = Field(
        default=(), validation_alias=AliasPath("config", "head", "int8_layers")
    )
    group_size: int = Field(
        default=DEFAULT_GROUP, validation_alias=AliasPath("config", "head", "group_size")
    )
    target_dtype: str | None = _at("config", "run", "target_dtype")
    precision: str | None = _at("config", "run", "precision")
    parameters: int | None = None
    steps: int | None = None
    epochs: float | None = None
    responses: int | None = _at("data", "train", "responses")
    target: str | None = _at("target", "name")
    origins: tuple[AnswerOrigin, ...] = Field(
        default=(), validation_alias=AliasPath("data", "train", "origins")
    )
    sequences: int | None = None  # as many as responses, where old records do not count these
    seconds: float | None = None
    data_sha256: str | None = None
    device: str | None = None
    peagle: str | None = None
    torch: str | None = None
    transformers: str | None = None
    commit: str | None = None
    step: int | None = _at("validation", "step")
    validation_loss: float | None = _at("validation", "loss")
    acceptance_lengths: list[float] = Field(
        default=[], validation_alias=AliasPath("validation", "acceptance_lengths")
    )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a head's training record from its train.json.

        Raises:
            CheckpointError: it is not JSON, or a value is of the wrong type.
        """
        data = read_object(path)
        if isinstance(best := data.get("best"), dict):
            data |= {"validation": best.get("validation")}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise CheckpointError(
                f"{str(path)!r}: {where}: {problem['msg']}. Restore it, or move it away: the card "
                "then says that the training is not recorded."
            ) from None


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A head that may be published.

    Attributes:
        folder: the head's folder; files: sorted names of the files to publish.
        config: its shape; format: style of its checkpoint.
        fingerprint: its target's fingerprint; target: the target's name in config.json, if any.
        parameters: floating-point values in its tensors; dtype: type of them.
        training: the record of its training, None if it has no record.
        trained_length: tokens of the longest sequence in it, None if that is not told.
        notes: facts that its owner should know before publishing it.
    """

    folder: Path
    files: tuple[str, ...]
    config: DrafterConfig
    format: HeadFormat
    fingerprint: TargetFingerprint
    target: str | None
    parameters: int
    dtype: str
    training: TrainRecord | None
    trained_length: int | None
    notes: tuple[str, ...]


def read_published(folder: str | Path) -> PublishedHead:
    """Check every tensor of a head for publication, and read the facts for its card.

    The record of its training is looked for in the folder and, as `peagle train` leaves it, beside
    it.

    Raises:
        UserError: no such folder; a file in it that must not be published (a pickle, a link out of
            the folder, something secret, anything that is not part of a head).
        CheckpointError: the head or its correction is not whole, or has no fingerprint of its
            target.
    """
    folder = require_folder(folder, "The draft head")
    _check_entries(folder)
    resolve_model(folder, role="draft")
    head = read_head(folder)
    if head.is_compact or head.is_quantised:
        raise CheckpointError(
            f"The draft head {str(folder)!r} is stored compactly, as not every runtime loads it. "
            f"Push what `peagle convert {folder} DST --format vllm --target TARGET` writes."
        )
    tensors, _ = head.read_tensors(folder)
    read_correction(folder, head.config)  # refuses a bad one
    files = _published_files(folder)
    fingerprint = _fingerprint(head, str(folder))
    floats = [value for value in tensors.values() if value.is_floating_point()]
    parameters = sum(value.numel() for value in floats)
    training, notes = _training(folder, head.config, parameters)
    return PublishedHead(
        folder=folder,
        files=files,
        config=head.config,
        format=head.format,
        fingerprint=fingerprint,
        target=head.target_name,
        parameters=parameters,
        dtype=", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in floats})),
        training=training,
        trained_length=head.trained_length,
        notes=notes,
    )


def _check_entries(folder: Path) -> None:
    """Refuse entries that must not leave the machine, before anything of the folder is read."""
    root = folder.resolve()
    unexpected = []
    for entry in sorted(folder.iterdir()):
        leads_to = Path(os.path.realpath(entry))
        if leads_to.parent != root:
            raise UserError(
                f"{str(entry)!r} is a link out of the folder, to {str(leads_to)!r}; expected the "
                "head's own files. Copy the head with `cp -rL` and push the copy."
            )
        if entry.suffix.lower() in _PICKLES:
            raise UserError(
                f"{str(entry)!r} is a pickle, which can run code when it is read; expected "
                "safetensors only. Move it away; peagle reads a head without it."
            )
        if _SECRET_NAME.search(entry.name):
            raise UserError(
                f"{str(entry)!r} looks like a secret by its name. Nothing is pushed while it is in "
                "the folder: move it away."
            )
        is_weights = entry.suffix == ".safetensors" or entry.name == CORRECTION_NAME
        if not entry.is_file() or (entry.name not in _TEXTS and not is_weights):
            unexpected.append(entry.name)
        elif entry.name in _TEXTS:
            _check_text(entry)
    _refuse_unexpected(folder, unexpected)


def _check_text(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{str(path)!r} is not readable: {error.strerror}.") from None
    if found := _SECRET.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UserError(
            f"{str(path)!r} holds what looks like a secret in line {line} (it begins with "
            f"{found.group()[:4]!r}). Remove it there, and revoke it if it was ever published."
        )


def _published_files(folder: Path) -> tuple[str, ...]:
    """Return the files to publish: texts, correction, and the safetensors files of the head.

    Raises a UserError for any other file.
    """
    if (folder / WEIGHTS_NAME).is_file():
        weights = {WEIGHTS_NAME}
        if (folder / INDEX_NAME).is_file():
            _refuse_unexpected(folder, [INDEX_NAME])
    elif (folder / INDEX_NAME).is_file():
        weights = set(read_object(folder / INDEX_NAME)["weight_map"].values())
    else:
        weights = {path.name for path in folder.glob("*.safetensors")}
    found = {path.name for path in folder.iterdir()}
    # Files of that name hold another layout: loading from a hub leaves them out.
    others = {name for name in weights if name.startswith("consolidated")}
    expected = {*weights, *_TEXTS, CORRECTION_NAME}
    _refuse_unexpected(folder, sorted(others | (found - expected)))
    return tuple(sorted(found))


def _refuse_unexpected(folder: Path, names: list[str]) -> None:
    if names:
        shown = ", ".join(map(repr, names[:_SHOWN_NAMES])) + ", ..." * (len(names) > _SHOWN_NAMES)
        raise UserError(
            f"The draft head {str(folder)!r} holds {shown}, no part of a head as peagle loads it "
            f"({len(names)} in all); expected {', '.join(_TEXTS)}, {CORRECTION_NAME} and the "
            "head's safetensors, with no folders. Move the rest away, or push a copy without it."
        )


def _fingerprint(head: StoredHead, name: str) -> TargetFingerprint:
    if (fingerprint := head.fingerprint) is None:
        raise CheckpointError(
            f"The draft head {name!r} has no fingerprint of its target, so no check could tell "
            "which model it fits. Load it with its target and save it again: save_drafter(..., "
            "fingerprint=TargetFingerprint.of(target)); `peagle train` does so."
        )
    for size, given in (
        ("vocab_size", head.config.vocab_size),
        ("hidden_size", head.config.target_hidden_size),
    ):
        if getattr(fingerprint, size) != given:
            raise CheckpointError(
                f"The draft head {name!r} has a fingerprint of a target with {size} "
                f"{getattr(fingerprint, size)}, but its config.json says {given}: it is a "
                "fingerprint of another target. Save the head again with that of its own."
            )
    return fingerprint


def _training(
    folder: Path, config: DrafterConfig, parameters: int
) -> tuple[TrainRecord | None, tuple[str, ...]]:
    """Return the record in the folder or its parent if it belongs to this head; else a note."""
    path = folder / RECORD_NAME
    if not path.is_file() and folder.resolve().name == _TRAINED_NAME:
        path = folder.resolve().parent / RECORD_NAME
    if not path.is_file():
        return None, (f"there is no {RECORD_NAME}: the card says that the training is unknown",)
    record = TrainRecord.read(path)
    kind = "peagle" if config.is_parallel else "eagle3"
    found = (record.method, record.depth, record.parameters)
    if found != (kind, config.trained_depth, parameters):
        return None, (f"{str(path)!r} is the record of another head: the card leaves it out",)
    return record, ()


# ---- the model card ----


_TEMPLATE = Path(__file__).with_name("model_card.md")
_Rows = list[tuple[str, str | None]]


def model_card(
    head: PublishedHead, repo: str, target: str, license: str, *, revision: str = DEFAULT_REVISION
) -> str:
    """Return README.md of a head: metadata for the hub, then text.

    The head is published as `repo` ("owner/name") in the branch `revision`; `target` is the hub id
    of its target, `license` the identifier of the head's licence, as the hub has it.
    """
    tags = ["speculative-decoding", head.config.kind.lower(), "peagle", "vllm"]
    metadata = ModelCardData(
        base_model=target,
        library_name="peagle",
        license=license,
        pipeline_tag="text-generation",
        tags=[*tags, "speculators"] if head.format == "speculators" else tags,
    )
    is_main, depth = revision == DEFAULT_REVISION, head.config.trained_depth
    k = default_k(depth)
    speculation = {"method": "eagle3", "model": repo}
    speculation |= {} if is_main else {"revision": revision}
    speculation |= {"num_speculative_tokens": k}
    speculation |= {"parallel_drafting": True} if head.config.is_parallel else {}
    record = head.training or TrainRecord()
    lengths = enumerate(record.acceptance_lengths, start=1)
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        name=repo.partition("/")[2],
        config=head.config,
        target=target,
        shape=_shape_rows(head, target),
        depth=depth,
        k=k,
        pinned=repo if is_main else f"{repo}@{revision}",
        speculation=json.dumps(speculation),
        training=_training_rows(record) if head.training else [],
        acceptance=[(k, f"{length:.3f}") for k, length in lengths],
        at_step="" if record.step is None else f" at step {record.step:,}",
        target_dtype=_escape(record.target_dtype or "not recorded"),
        head_dtype=_escape(record.precision or "not recorded"),
    )
    return f"{card}\n"


def _shape_rows(head: PublishedHead, target: str) -> _Rows:
    config, mark = head.config, head.fingerprint
    depth, tokenizer = config.trained_depth, mark.tokenizer_sha256
    longest = head.trained_length
    drafting = "parallel drafting" if config.is_parallel else "autoregressive"
    return [
        ("kind", f"{head.config.kind} ({drafting})"),
        ("target", f"`{target}` ({mark.num_layers} layers, width {mark.hidden_size:,})"),
        ("layers", f"{config.num_layers}, width {config.hidden_size:,}"),
        ("parameters", f"{head.parameters:,}, {head.dtype}"),
        ("K it was trained for", None if depth is None else str(depth)),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("reads the states entering target layers", ", ".join(map(str, config.aux_layer_ids))),
        ("longest context", f"{config.max_position_embeddings:,} tokens"),
        ("longest sequence it was trained on", None if longest is None else f"{longest:,} tokens"),
        ("checkpoint", f"style of {head.format}, safetensors"),
        ("target's tokenizer.json, SHA-256", f"`{tokenizer}`" if tokenizer else None),
        ("target's lm_head rows, SHA-256", f"`{mark.lm_head_sha256}`"),
    ]


def _training_rows(record: TrainRecord) -> _Rows:
    versions = {name: getattr(record, name) for name in ("peagle", "torch", "transformers")}
    rounded: _Rows = []
    if record.quantization is not None:
        how = HeadQuantization(record.quantization, record.int8_layers, record.group_size)
        rounded = [("linear layers rounded in training", _escape(str(how)))]
    software = ", ".join(f"{name} {_escape(v)}" for name, v in versions.items() if v)

    def shown(value: Any, form: str = "{}") -> str | None:
        return None if value is None else _escape(form.format(value))

    return [
        ("method", shown(record.method and f"{record.method}, depth {record.depth}")),
        ("loss", shown(record.loss)),
        *rounded,
        ("steps", shown(record.steps, "{:,}")),
        ("epochs", shown(record.epochs, "{:.2f}")),
        ("responses of the target trained on", shown(record.responses or record.sequences, "{:,}")),
        ("origin of the prompts", shown(prompts_text(record))),
        ("origin of the answers", shown(answers_text(record))),
        ("data, SHA-256", shown(record.data_sha256)),
        ("validation loss", shown(record.validation_loss, "{:.4f}")),
        ("hardware", shown(record.device)),
        ("duration", shown(record.seconds and record.seconds / 60, "{:.1f} minutes")),
        ("software", software or None),
        ("commit of peagle", shown(record.commit)),
    ]


def prompts_text(record: TrainRecord) -> str | None:
    """Say who wrote the prompts; None if that is not recorded of all of them."""
    found = [origin.prompts for origin in record.origins]
    written = {one.sha256: one for one in found if one is not None}.values()
    if not written or None in found:
        return None
    kept, sampled = sum(one.prompts for one in written), sum(one.samples for one in written)
    names = {one.model for one in written}
    return f"{kept:,}, kept of {sampled:,} samples of {_models_text(names, record)}"


def answers_text(record: TrainRecord) -> str | None:
    """Say which model gave the answers, by temperature; None if that is not recorded."""
    if not record.origins:
        return None
    counts = Counter[float | None]()
    for origin in record.origins:
        counts[origin.temperature] += origin.answers
    parts = [
        f"{count:,} at {'the default temperature' if at is None else f'temperature {at:g}'}"
        for at, count in sorted(counts.items(), key=lambda item: item[0] or 0.0)
    ]
    names = {origin.model for origin in record.origins}
    return f"{_models_text(names, record)}: {', '.join(parts)}"


def _models_text(names: set[str], record: TrainRecord) -> str:
    """Name models; the target is recorded by its folder, and answers by the folder's name."""
    is_target = record.target is not None and names == {Path(record.target).name}
    return "the target itself" if is_target else ", ".join(sorted(names))


def _escape(text: str) -> str:
    """Return a record's text as one cell of a table: nothing in it ends the cell or is markup."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", " ".join(text.split()))
