"""The training configuration: one TOML file, checked when it is read."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from peagle.bundled import Role, expand_bundled
from peagle.config import require_folder, require_writable_folder
from peagle.config.checks import did_you_mean
from peagle.errors import UserError, short_repr
from peagle.model_folder import read_json
from peagle.models.gguf_header import is_gguf
from peagle.models.head_json import refuse_whole_model
from peagle.models.head_quantization import (
    DEFAULT_GROUP,
    GROUP_MULTIPLE,
    HeadQuantization,
    LinearLayer,
    StoredQuantization,
)

FORMAT_VERSION = 1
DATA_SUFFIXES = (".jsonl", ".safetensors")  # of files of responses

LossKind = Literal["kl", "ce", "tv", "kl_tv"]


def _model(role: Role) -> BeforeValidator:
    """Return a validator that reads names of bundled models, before "./bundled" loses its dot."""
    return BeforeValidator(
        lambda name: expand_bundled(name, role) if isinstance(name, str) else name
    )


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_flags_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic reads true as 1. Fields that take "auto" say themselves what they expect.
        values = value if isinstance(value, list) else [value]
        kinds = _types(cls.model_fields[info.field_name or ""].annotation)
        if bool in map(type, values) and not kinds & {bool, "auto"} and kinds & {int, float}:
            raise ValueError("expected a number, not true or false")
        return value


def _types(annotation: Any) -> set[Any]:
    """Return the types that an annotation names, also within others."""
    return {annotation}.union(*map(_types, get_args(annotation)))


def _used(section: _Section, *young: str) -> dict[str, Any]:
    """Return a section as JSON, without the options of `young` that have their default.

    Checkpoints that are older than such an option do not have it.
    """
    facts, fields = section.model_dump(mode="json"), type(section).model_fields
    unset = {name for name in young if getattr(section, name) == fields[name].default}
    return {name: value for name, value in facts.items() if name not in unset}


class HeadSection(_Section):
    """Shape of the head; values that are left out are the target's.

    Attributes:
        num_layers: decoder layers (the paper's heads have 4, EAGLE-3 heads 1).
        hidden_size, intermediate_size, num_attention_heads, num_kv_heads, head_dim: geometry.
        draft_vocab_size: keep the most frequent tokens of the training responses, and those that
            end a text; none keeps all.
        keep_special_tokens: keep the tokenizer's special tokens too.
        aux_layer_ids: target layers whose entering states are the feature.
        mask_token_id: token of the mask slots; none takes the tokenizer's `<|mask|>` or, failing
            that, the last id of the vocabulary.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: conventions of the head.
        qk_norm: Qwen3-style layers, with a norm on every query and key head.
        freeze_embeddings: keep the embeddings as they start, as the target's in a new head (costs
            about 5% acceptance length).
        freeze_lm_head: keep lm_head as it starts, as the target's rows of the draft vocabulary in a
            new head, which then must be as wide as the target.
        quantization: train the head with the linear layers, fc included, rounded to "int8" or
            "int4", and store them so, as `peagle convert --format compact` does; none keeps them
            whole.
        int8_layers: last names of layers that get INT8 in any case.
        group_size: inputs that share a scale.
        init: folder of a head to start from in place of random weights, P-EAGLE or EAGLE-3;
            "bundled" and "bundled-eagle3" are the bundled heads. Values left out above are then
            that head's, given values must agree with it; num_layers may be larger
            (`training.warm_start`). Not part of a dump: the record of the warm start has it.
    """

    num_layers: int = Field(4, ge=1)
    hidden_size: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    draft_vocab_size: int | None = Field(None, ge=1)
    keep_special_tokens: bool = False
    aux_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = Field(None, ge=0)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    freeze_embeddings: bool = False
    freeze_lm_head: bool = False
    quantization: StoredQuantization | None = None
    int8_layers: tuple[LinearLayer, ...] = ()
    group_size: int = Field(DEFAULT_GROUP, ge=GROUP_MULTIPLE, multiple_of=GROUP_MULTIPLE)
    init: Annotated[Path | None, _model("draft")] = Field(None, exclude=True)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Return the names of the head's parameters that stay as they start."""
        ends = {"embed_tokens": self.freeze_embeddings, "lm_head": self.freeze_lm_head}
        return tuple(f"{name}.weight" for name, is_frozen in ends.items() if is_frozen)

    @property
    def freezes_ends(self) -> bool:
        """Return whether the head keeps both of its ends: a new head then stores neither."""
        return self.freeze_embeddings and self.freeze_lm_head

    def facts(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with its checkpoint (`_used`)."""
        return _used(self, "freeze_lm_head", "quantization", "int8_layers", "group_size")

    @property
    def layer_quantization(self) -> HeadQuantization | None:
        """Return how the linear layers are rounded and stored; None where they are not."""
        if self.quantization is None:
            return None
        return HeadQuantization(self.quantization, self.int8_layers, self.group_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantization is None:
            for name, default in (("int8_layers", ()), ("group_size", DEFAULT_GROUP)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name} is {value} and there is no quantization, without which no layer "
                        'is rounded; expected quantization = "int4" or "int8" beside it'
                    )
        return self


class DataSection(_Section):
    """Responses that the target generated.

    Attributes:
        train, validation: files, .jsonl or .safetensors (`ResponseDataset.load` has the formats).
        features, validation_features: folders that `peagle data features` wrote for these files:
            the target is then not run, and not loaded but for its embedding and lm_head.
        max_length: longer sequences are cut here.
        batch_tokens: tokens of a batch, padding included. Sequences are packed into rows as long as
            the longest of them.
        length_multiple: rows of a batch are padded to a multiple of this.
    """

    train: Path
    validation: Path | None = None
    features: Path | None = None
    validation_features: Path | None = None
    max_length: int = Field(2048, ge=8)
    batch_tokens: int = Field(8192, ge=8)
    length_multiple: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        stored = (self.features is not None, self.validation_features is not None)
        if stored != (stored[0], stored[0] and self.validation is not None):
            raise ValueError(
                f"features is {str(self.features)!r} and validation_features is "
                f"{str(self.validation_features)!r}; expected both with validation data, the first "
                "alone without, or none: write the missing one with `peagle data features`"
            )
        return self


class MethodSection(_Section):
    """The method of training.

    Attributes:
        name: "peagle" (parallel drafting) or "eagle3" (training-time test).
        depth: K_train; training deeper than the K served pays (8 for 5: +4%).
        cod_ratio, cod_floor: conditional drop of P-EAGLE elements.
        loss: "kl" of target to draft, "ce" on the target's most likely token, "tv" (the chance of
            a rejection when drafts are drawn), "kl_tv" (both; `chunked_loss.DraftLoss` has them).
        tv_share: weight of TV in "kl_tv"; KL has the rest.
        depth_decay: weight of depth d is depth_decay^d.
        depth_weights: one weight a depth in place of `depth_decay`; the `acceptance` of an earlier
            run, moved one down ([1, a0, a1, ...]), weighs each depth by how often a draft gets
            there.
    """

    name: Literal["peagle", "eagle3"] = "peagle"
    depth: int = Field(8, ge=1, le=64)
    cod_ratio: float = Field(0.8, gt=0, le=1)
    cod_floor: float = Field(0.2, ge=0, le=1)
    loss: LossKind = "kl"
    tv_share: float = Field(0.5, ge=0, le=1)
    depth_decay: float = Field(1.0, gt=0, le=1)
    depth_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        weights = self.depth_weights
        if weights is not None and len(weights) != self.depth:
            raise ValueError(
                f"depth_weights has {len(weights)} weights; expected one for each of the "
                f"{self.depth} depths"
            )
        if weights is not None and not any(weights):
            raise ValueError("depth_weights are all 0; expected one above 0")
        return self

    def weights(self) -> list[float]:
        """Return the weight of each depth."""
        if self.depth_weights is not None:
            return list(self.depth_weights)
        return [self.depth_decay**depth for depth in range(self.depth)]

    def facts(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with its checkpoint (`_used`)."""
        return _used(self, "tv_share", "depth_weights")


class CorrectionSection(_Section):
    """A correction of drafts (`models.correction`): trained with its head, or fitted on it.

    Trained together, the corrected logits have the head's loss, weights of depths and optimizer,
    and the gradient reaches the head. Fitted, the head is frozen: the learning rate falls linearly
    to zero, without decay of weights, the loss is KL(target || draft), and a slot counts by how
    often drafts get there.

    Attributes:
        train: "together" trains a correction as a part of the head, P-EAGLE only: that of
            `head.init`, if it has one, or a fresh one. "after" trains a head by itself, and a
            correction where `on` names a head.
        on: folder of a head to fit a correction on, in place of training a head; none trains a
            head. The correction is written beside the head.
        start: "fresh" fits from a term of 0; "present" goes on with the correction that the head
            has, where it has one.
        rank, width: r and W of the term; a slot reads r numbers of each token of the draft
            vocabulary.
        alone: share of the chains that are graded without the correction when both are trained
            together, so that the head by itself keeps its worth; of the loss this is a weight of
            alone for the head's own logits and 1 - alone for the corrected ones.
        own_drafts: share of the chains that are corrected by the head's own drafts, in place of the
            text's tokens, when both are trained together. A draft counts only where those before it
            are the text's, so none is needed.
        steps: optimizer steps of a fit, minutes.
        learning_rate: the highest of a fit.
        survival: weight of a slot relative to the slot before it, in a fit.
    """

    train: Literal["after", "together"] = "after"
    on: Annotated[Path | None, _model("draft")] = None
    start: Literal["fresh", "present"] = "fresh"
    rank: int = Field(64, ge=1, le=8192)
    width: int = Field(256, ge=1, le=8192)
    alone: float = Field(0.25, ge=0, le=0.75)
    own_drafts: float = Field(0.0, ge=0, le=0.25)
    steps: int = Field(1100, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    survival: float = Field(0.7, gt=0, le=1)

    @property
    def is_trained(self) -> bool:
        """Return whether a correction is trained or fitted."""
        return self.on is not None or self.train == "together"

    def facts(self) -> dict[str, Any] | None:
        """Return the settings that a resumed run must share with its checkpoint; None: there is no
        correction.
        """
        if not self.is_trained:
            return None
        own = {"survival"} if self.on is not None else {"train", "alone", "own_drafts"}
        return self.model_dump(mode="json", include={"rank", "width", *own})


OptimizerName = Literal["adamw", "muon"]
# The highest learning rate of each optimizer, where none is given. Muon's is that of the heads of
# models of 147M parameters; heads of a model of 5M learned as well at 1e-2 and 2e-2.
LEARNING_RATES: dict[OptimizerName, float] = {"adamw": 1e-4, "muon": 5e-3}
OPTIMIZER_TITLES: dict[OptimizerName, str] = {"adamw": "AdamW", "muon": "Muon"}


class OptimizerSection(_Section):
    """Linear warm-up, then linear decay to zero.

    Attributes:
        name: "muon" for the matrices of the layers with AdamW for all else, or "adamw" for all. A
            section with a learning rate and without a name has AdamW, for which such rates were
            chosen: it was the default once.
        steps: optimizer steps of the whole run; none where `run.minutes` plans them.
        learning_rate: the highest; none is 5e-3 for Muon and 1e-4 for AdamW.
        warmup_ratio: share of the steps that warm up.
        weight_decay: decoupled, on matrices only.
        betas: of AdamW.
        max_grad_norm: gradients are clipped to this norm.
    """

    name: OptimizerName = "muon"
    steps: int | None = Field(None, ge=1)
    learning_rate: float = Field(LEARNING_RATES["muon"], gt=0)
    warmup_ratio: float = Field(0.01, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _fill(self) -> Self:
        """Set the name or the rate that the other one implies; neither counts as given."""
        if self.has_rate_alone:
            object.__setattr__(self, "name", "adamw")
        elif "learning_rate" not in self.model_fields_set:
            object.__setattr__(self, "learning_rate", LEARNING_RATES[self.name])
        return self

    @property
    def has_rate_alone(self) -> bool:
        """Return whether a learning rate was given without the name of the optimizer."""
        return "learning_rate" in self.model_fields_set and "name" not in self.model_fields_set

    @property
    def planned_steps(self) -> int:
        """Return `steps` of a run that has begun, when `run.minutes` has planned them."""
        assert self.steps is not None, "steps are planned before the first of them"
        return self.steps


def _count_or_auto(value: Any) -> Any:
    # Each kind that a union may hold would complain for itself.
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError('expected "auto" or a whole number of at least 1')
    return value


def _flag_or_auto(value: Any) -> Any:
    if value != "auto" and type(value) is not bool:
        raise ValueError('expected "auto", true or false')
    return value


class RunSection(_Section):
    """The place of a run, its pace and its output.

    Attributes:
        seed: seed of the initial weights, the order of the data and element sampling.
        device: "auto" takes the GPU if there is one.
        target_dtype: type of the frozen target; "auto": float32 on a CPU, bfloat16 on a GPU.
        precision: type of the head's matrix products; weights are kept in float32.
        save_dtype: type of the head that the run writes at its end.
        log_every, validate_every, save_every: steps between.
        validation_batches: batches of a validation.
        validation_temperature: simulate acceptance at this temperature too; 0 does not. Best the
            one that the validation responses were drawn at (`training.acceptance`).
        select: which simulated acceptance length of the validation chooses the head that is kept,
            "greedy" or "sampled" (at `validation_temperature`).
        select_k: at which K; None is the depth of the method.
        patience: stop after this many validations in a row without a better head; None never does.
        minutes: plan `optimizer.steps` so that all steps take so long: a few steps are measured
            before the first, and undone. Compiling, measuring, validation and saving come on top. A
            resumed run keeps the planned number.
        attention: "flex" (FlexAttention), "dense" (a mask), "auto" is flex for P-EAGLE on
            a GPU.
        segments: parts of the two-pass partition (`training.partition`), P-EAGLE only: depth 0 runs
            once, the deeper elements in this many segments, one after another in memory; the
            gradients are the same. "auto" takes the fewest that fit into memory
            (`training.step_memory`), and a resumed run keeps its number where it still fits.
            Gradients of different numbers agree but for rounding.
        recompute_layers: activation checkpointing, P-EAGLE only: keep the input of each layer and
            run the layer again for its gradients. Less memory, a third more time. "auto" does so
            if nothing fits without.
        memory_gib: most memory of a process, in GiB; none is 0.9 of its GPU's free memory at the
            start, on a CPU half of the memory that is available then.
        loss_chunk_rows: elements whose logits are in memory at once; None chooses by the
            vocabularies.
    """

    seed: int = Field(0, ge=0, lt=1 << 63)
    device: str = "auto"
    target_dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    save_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    log_every: int = Field(20, ge=1)
    validate_every: int = Field(500, ge=1)
    save_every: int = Field(500, ge=1)
    validation_batches: int = Field(8, ge=1)
    validation_temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    select: Literal["greedy", "sampled"] = "greedy"
    select_k: int | None = Field(None, ge=1)
    patience: int | None = Field(None, ge=1)
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False)
    attention: Literal["auto", "flex", "dense"] = "auto"
    segments: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = "auto"
    recompute_layers: Annotated[bool | Literal["auto"], BeforeValidator(_flag_or_auto)] = "auto"
    memory_gib: float | None = Field(None, gt=0, allow_inf_nan=False)
    loss_chunk_rows: int | None = Field(None, ge=1)

    def steps_within(self, seconds_per_step: float) -> int:
        """Return the number of steps that `minutes` have room for, at least 1."""
        assert self.minutes is not None
        return max(1, int(60 * self.minutes / max(seconds_per_step, 1e-6)))


class TrainConfig(_Section):
    """A whole training run.

    Attributes:
        target: folder of the target model; "bundled" is the bundled code model.
        output: folder that receives the head, the checkpoint to resume from and the records.
        optimizer: of a head; a correction has its steps and rate in its own table.
    """

    format_version: int = FORMAT_VERSION
    target: Annotated[Path, _model("target")]
    output: Path
    head: HeadSection = HeadSection()  # type: ignore[call-arg]
    data: DataSection
    method: MethodSection = MethodSection()  # type: ignore[call-arg]
    correction: CorrectionSection = CorrectionSection()  # type: ignore[call-arg]
    optimizer: OptimizerSection = OptimizerSection()  # type: ignore[call-arg]
    run: RunSection = RunSection()  # type: ignore[call-arg]

    @model_validator(mode="before")
    @classmethod
    def _optimize_correction(cls, data: Any) -> Any:
        """Fill in a correction's own [optimizer], steps and loss, if one is fitted."""
        given = data.get("correction") if isinstance(data, dict) else None
        if not isinstance(given, dict) or given.get("on") is None:
            return data
        try:
            own = CorrectionSection.model_validate(given)
        except ValidationError:
            return data  # the section says what is wrong with it
        optimizer = {"steps": own.steps, "learning_rate": own.learning_rate, "betas": (0.9, 0.999)}
        method = dict(data.get("method") or {})
        depth = method.get("depth", MethodSection.model_fields["depth"].default)
        if type(depth) is int and depth > 0:
            # The first slot is not corrected.
            method["depth_weights"] = (0.0, *(own.survival**slot for slot in range(depth - 1)))
        found: dict[str, Any] = {"optimizer": optimizer, "method": method | {"loss": "kl"}}
        if isinstance(run := data.get("run"), dict):
            found["run"] = {name: value for name, value in run.items() if name != "minutes"}
        return {**data, **found}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version is {self.format_version}, newer than this peagle reads "
                f"({FORMAT_VERSION}); upgrade peagle"
            )
        if self.data.batch_tokens < self.data.length_multiple:
            raise ValueError("data.batch_tokens must hold at least one row of data.length_multiple")
        self._check_steps()
        self._check_selection()
        self._check_correction()
        if self.method.name == "eagle3":
            for name in ("segments", "recompute_layers"):
                if (value := getattr(self.run, name)) not in ("auto", False):
                    raise ValueError(
                        f"run.{name} is {value} and method.name is 'eagle3'; it works on P-EAGLE's "
                        "elements only: leave it out"
                    )
        return self

    def _check_steps(self) -> None:
        steps, minutes = self.optimizer.steps, self.run.minutes
        if steps is None and minutes is None:
            raise ValueError(
                "optimizer.steps is missing, and so is run.minutes; expected one of them: the "
                "number of steps, or the minutes that they may take"
            )
        if steps is not None and minutes is not None:
            raise ValueError(
                f"optimizer.steps is {steps} and run.minutes is {minutes:g}, which plans the "
                "steps; leave one of them out"
            )

    def _check_correction(self) -> None:
        own, method = self.correction, self.method
        if own.on is not None and own.train == "together":
            raise ValueError(
                f"correction.on is {str(own.on)!r}, a head that stays as it is, and "
                "correction.train is 'together', which trains a head; leave one of them out, or "
                'set correction.train = "after"'
            )
        given = f"on is {str(own.on)!r}" if own.on is not None else f"train is {own.train!r}"
        if own.is_trained and (method.name != "peagle" or method.depth < 2):
            raise ValueError(
                f"correction.{given} with method.name {method.name!r} and method.depth "
                f"{method.depth}; expected 'peagle' and at least 2: only the drafts of one pass do "
                "not see each other"
            )

    def _check_selection(self) -> None:
        run, depth = self.run, self.method.depth
        if (run.select_k or 1) > depth:
            raise ValueError(
                f"run.select_k is {run.select_k}; expected at most method.depth, {depth}"
            )
        if run.select == "sampled" and not run.validation_temperature:
            raise ValueError(
                "run.select is 'sampled' and run.validation_temperature is 0, which samples "
                "nothing: give a temperature above 0"
            )
        if run.patience is not None and self.data.validation is None:
            raise ValueError(
                f"run.patience is {run.patience}, but there is no data.validation to judge heads by"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the whole run as a JSON object with the keys of a file; defaults are filled in."""
        head = {"init": None if self.head.init is None else str(self.head.init)}
        data = self.model_dump(mode="json")
        return data | {"head": data["head"] | head}

    def planned(self, steps: int) -> Self:
        """Return this run with a number of steps, which `run.minutes` has left open."""
        optimizer = self.optimizer.model_copy(update={"steps": steps})
        return self.model_copy(update={"optimizer": optimizer})

    @property
    def head_folder(self) -> Path:
        """Return the folder of the head that the run writes, or writes a correction for."""
        return self.correction.on or self.output / "head"

    @classmethod
    def read(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        output: Path | None = None,
        correction_on: str | None = None,
    ) -> Self:
        """Read a TOML file; relative paths in it are relative to its folder.

        `overrides`, "section.key=value" in TOML's notation, go over the file. So do `output` and
        `correction_on` (`correction.on`), which are relative to the working directory.

        Raises:
            UserError: the file is missing, not TOML, or a key or value is not understood.
        """
        file = Path(path)
        if not file.is_file():
            found = "is a folder; expected a TOML file" if file.is_dir() else "is not there"
            raise UserError(f"The training configuration {str(path)!r} {found}.")
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{str(path)!r} is not TOML: {error}.") from None
        sources: dict[str, str] = {}  # options, by key
        for override in overrides:
            sources[_put(data, override)] = f"--set {override}"
        if output is not None:
            sources["output"] = "--output"
            data["output"] = str(output.absolute())
        if correction_on is not None:
            sources["correction.on"] = "--correction-on"
            head = Path(expand_bundled(correction_on, "draft")).absolute()
            _put(data, f"correction.on={json.dumps(str(head))}")
        config = cls.of(data, source=str(path), options=sources)
        return config._relative_to(file.parent)._with_target_folder()

    @classmethod
    def of(
        cls,
        data: dict[str, Any],
        overrides: Sequence[str] = (),
        *,
        source: str,
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the run with the keys of a file; `overrides` go over them, as in `read`.

        Args:
            options: what gave some values already, by their keys.

        Raises:
            UserError: a key or value is not understood; it names the option, or `source`.
        """
        given = {_put(data, override): f"--set {override}" for override in overrides}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            by_key = {**(options or {}), **given}
            raise UserError(_first_problem(error, repr(source), by_key)) from None

    def check_paths(self) -> None:
        """Refuse a target, an init head or data files that are not there.

        Raises:
            UserError: naming the key and what to do.
        """
        _require_model(self.target, "The target model")
        if (init := self.head.init) is not None:
            _require_model(init, "head.init:")
            self.check_init()
            if isinstance(given := read_json(init / "config.json"), dict):
                refuse_whole_model(given, str(init))
        if self.correction.on is not None:
            _require_model(self.correction.on, "The head to correct")
            require_writable_folder(self.correction.on, "The head to correct")
        data = self.data
        if not data.train.is_file():
            raise UserError(
                f"data.train is {str(data.train)!r}, which is not there. `peagle data prepare` "
                f"writes it: peagle data prepare RESPONSES --target {self.target} --output "
                f"{data.train}"
            )
        if data.validation is not None and not data.validation.is_file():
            raise UserError(
                f"data.validation is {str(data.validation)!r}, which is not there. `peagle data "
                "prepare` writes it with --validation FILE, or as NAME.validation.safetensors "
                "with --validation-share alone. Or leave data.validation out: the newest head is "
                "then kept in place of the best one."
            )
        for name, file in (("data.train", data.train), ("data.validation", data.validation)):
            if file is not None and file.suffix not in DATA_SUFFIXES:
                raise UserError(
                    f"{name} is {str(file)!r}; expected a file that ends in "
                    f"{' or '.join(DATA_SUFFIXES)}. `peagle data prepare` makes one of it."
                )
        stores = {"features": data.train, "validation_features": data.validation}
        for name, file in stores.items():
            folder = getattr(data, name)
            if folder is not None and not folder.is_dir():
                raise UserError(
                    f"data.{name} is {str(folder)!r}, which is no folder. `peagle data features` "
                    f"writes it: peagle data features {file} --target {self.target} --output "
                    f"{folder}"
                )

    def check_init(self) -> None:
        """Refuse a head to start from that the run would write over.

        Raises:
            UserError: it is in the output folder's head/.
        """
        init = self.head.init
        if init is not None and init.resolve() == (self.output / "head").resolve():
            raise UserError(
                f"head.init is {str(init)!r}, where this run writes its head; choose another "
                "output."
            )

    def _relative_to(self, folder: Path) -> Self:
        names = ("train", "validation", "features", "validation_features")
        paths = {name: getattr(self.data, name) for name in names}
        data = self.data.model_copy(
            update={name: folder / path for name, path in paths.items() if path is not None}
        )
        update = {"target": folder / self.target, "output": folder / self.output, "data": data}
        if self.head.init is not None:
            update["head"] = self.head.model_copy(update={"init": folder / self.head.init})
        if self.correction.on is not None:
            update["correction"] = self.correction.model_copy(
                update={"on": folder / self.correction.on}
            )
            update["output"] = folder / self.output / "correction"
        return self.model_copy(update=update)

    def _with_target_folder(self) -> Self:
        """Return the run with the folder of a target that is a GGUF file."""
        if not is_gguf(self.target):
            return self
        from peagle.models.loading import resolve_model

        return self.model_copy(update={"target": resolve_model(self.target)})


def optimizer_note(given: TrainConfig, run: TrainConfig) -> str:
    """Say in a sentence why a run does not have the default optimizer that its file leaves open.

    Args:
        given: the run as its file gives it.
        run: the run, which has the optimizer of its checkpoint where it goes on.
    """
    asked, used = given.optimizer, run.optimizer
    name, rate = OPTIMIZER_TITLES[used.name], used.learning_rate
    if given.correction.on is not None or "name" in asked.model_fields_set:
        return ""
    if asked.has_rate_alone and used.name == "adamw":
        muon = LEARNING_RATES["muon"]
        return (
            f"optimizer.learning_rate = {rate:g} without optimizer.name is a rate of {name}, which "
            f"is used; the default is Muon at {muon:g}, which learns far faster: leave the rate "
            "out for it, or name the optimizer."
        )
    if (used.name, rate) != (asked.name, asked.learning_rate):
        title = OPTIMIZER_TITLES[asked.name]
        return (
            f"the run goes on with the {name} at {rate:g} that it began with; a new one would have "
            f"{title} at {asked.learning_rate:g}."
        )
    return ""


def _require_model(folder: Path, what: str) -> None:
    require_folder(folder, what)
    if not (folder / "config.json").is_file():
        raise UserError(f"{what} {str(folder)!r} has no config.json; expected a model's folder.")


def _put(data: dict[str, Any], override: str) -> str:
    name, sign, text = override.partition("=")
    if not sign:
        raise UserError(f"--set is {override!r}; expected KEY=VALUE, as in optimizer.steps=2000.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is text
    *sections, key = name.strip().split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"--set is {override!r}, but {section} is not a section.")
    data[key] = value
    return name.strip()


def _first_problem(error: ValidationError, file: str, sources: Mapping[str, str]) -> str:
    """Return the problem that explains the most, behind the file or the options that gave it."""
    problems = error.errors()
    # A misspelt key explains that another one is missing.
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    problem = [*unknown, *problems][0]
    where = ".".join(str(part) for part in problem["loc"])
    text = _problem_text(problem, where)
    for key, source in sources.items():
        is_unknown = problem["type"] == "extra_forbidden" and key.startswith(f"{where}.")
        if is_unknown or f"{where}.".startswith(f"{key}."):
            return f"{source}: {text}"
    # A check of a whole section names several values.
    prefix = f"{where}." if where else ""
    names = {key.removeprefix(prefix): s for key, s in sources.items() if key.startswith(prefix)}
    named = [source for name, source in names.items() if f" {name} " in f" {text}"]
    return f"{' with '.join([file, *named])}: {text}"


def _problem_text(problem: Any, where: str) -> str:
    given, reason = problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        beside = _SECTIONS.get(where.rpartition(".")[0], TrainConfig).model_fields
        meant = did_you_mean(where, _known_keys(TrainConfig)) or f" Known: {', '.join(beside)}."
        return f"{where} is not a known key.{meant}"
    if problem["type"] == "missing":
        return f"{where} is missing."
    if problem["type"] == "model_type":
        known = ", ".join(_known_keys(_SECTIONS[where]))
        return f"{where} is {short_repr(given)}; expected a table, [{where}], with some of {known}."
    # A check of a whole section names its values itself.
    if not where:
        return f"{reason}."
    is_section = isinstance(given, dict) and where in _SECTIONS
    return f"{where}: {reason}." if is_section else f"{where} is {short_repr(given)}: {reason}."


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in model.model_fields:
        yield prefix + name
        if prefix + name in _SECTIONS:
            yield from _known_keys(_SECTIONS[name], f"{name}.")


_SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in TrainConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
