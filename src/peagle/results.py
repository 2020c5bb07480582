"""Results in files: acceptance.json of `peagle eval`, throughput.json of bench, tune.json of tune.

Writers build these models and readers get them back, so that a key is named in one place. A file of
an earlier peagle may lack a key that has a default, and null stands for a default too. A key that
is not listed is refused, except in `provenance` and `settings`.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    computed_field,
    field_validator,
    model_serializer,
    model_validator,
)

from peagle.errors import UserError

FORMAT_VERSION = 1
# Fewer optimizer steps than this have not made a good head of a real model yet.
FEW_STEPS = 1000
ACCEPTANCE, THROUGHPUT, TUNE = "acceptance.json", "throughput.json", "tune.json"
CERTIFICATE = "certificate.json"

Interval = tuple[float, float]
Number = int | float
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]
_FROM = Field(validation_alias=AliasChoices("from", "first"), serialization_alias="from")
_TO = Field(validation_alias=AliasChoices("to", "last"), serialization_alias="to")


class ResultModel(BaseModel):
    """An object of one of the files. Null counts as the default of its key, if it has one.

    Computed keys are written, and computed again when a file is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        computed = cls.model_computed_fields
        return {
            key: value
            for key, value in data.items()
            if key not in computed and (value is not None or key not in optional)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object as JSON."""
        return self.model_dump(mode="json", by_alias=True)


def _text(value: Any) -> Any:
    return "" if value is None else value


class Provenance(ResultModel):
    """The origin of the numbers of a file; further keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    command: str = ""
    created: str = ""
    environment: dict[str, Any] = {}
    target: str
    dtype: Annotated[str, BeforeValidator(_text)] = ""


class Turns(ResultModel):
    """The turns of each prompt of a set that were sent, and the most that its prompts have."""

    sent: Count
    most: Count

    def __str__(self) -> str:
        if self.sent < self.most:
            return "first turn" if self.sent == 1 else f"first {self.sent} turns of {self.most}"
        return "both turns" if self.most == 2 else f"all {self.most} turns"


class Document(ResultModel):
    """The keys that every file has."""

    format_version: int = FORMAT_VERSION
    provenance: Provenance
    settings: dict[str, Any] = {}

    @property
    def is_synthetic(self) -> bool:
        """Return whether acceptance was set instead of measured."""
        extra = self.provenance.model_extra or {}
        return bool(extra.get("synthetic") or self.settings.get("synthetic"))


class TrainingRecord(ResultModel):
    """The length of a head's training; None where it is not recorded."""

    steps: Count  # optimizer steps done
    planned: Count | None = None
    tokens: Count | None = None
    stopped_early: bool = False  # validation did not improve
    continues: bool = False  # began with a whole head of the same kind

    @property
    def is_little(self) -> bool:
        """Return whether the head cannot be judged yet: few steps, or under half of the plan."""
        unfinished = self.planned is not None and 2 * self.steps < self.planned
        few = self.steps < FEW_STEPS and not self.continues
        return few or (unfinished and not self.stopped_early)

    def __str__(self) -> str:
        of = f" of {self.planned:,}" if self.planned not in (None, self.steps) else ""
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        return f"{self.steps:,}{of} steps{tokens}"


class TextFigures(ResultModel):
    """Figures with shares of the text; these are empty, and not written, where no text drafts.

    Attributes:
        head_per_pos: P(token i accepted, and drafted by the head).
        text_per_pos: P(token i accepted, and drafted by the text alone).
    """

    head_per_pos: list[float] = []
    text_per_pos: list[float] = []

    @model_serializer(mode="wrap")
    def _without_text(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value or name not in _OF_TEXT}


_OF_TEXT = {"num_accepted_text_tokens_per_pos", "head_per_pos", "text_per_pos"}


# ---- acceptance.json ----


class Slice(TextFigures):
    """Pooled counters of some of the requests, and the figures that follow from them."""

    num_requests: Count = 0
    num_tokens: Count = 0
    num_drafts: Count
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count
    num_accepted_tokens_per_pos: list[Count] = []
    num_accepted_text_tokens_per_pos: list[Count] = []  # of the text alone, where it drafts
    acceptance_length: float | None
    unconditional: list[float] = []
    conditional: list[float | None] = []
    acceptance_length_ci: Interval | None = None
    unconditional_ci: list[Interval | None] | None = None
    conditional_ci: list[Interval | None] | None = None
    tokens_per_step: float | None = None
    loop_share: float | None = None
    acceptance_length_before_loop: float | None = None

    @property
    def length(self) -> float | None:
        """Return the acceptance length; None where nothing was drafted."""
        return self.acceptance_length if self.num_drafts else None


class RangeSlice(ResultModel):
    """The drafts that began with so many tokens of context, or so far into the output."""

    first: Number = _FROM
    last: Number = _TO
    slice: Slice


class HistogramBin(ResultModel):
    """Number of requests whose acceptance length lies in [first, last)."""

    first: float = _FROM
    last: float = _TO
    count: Count


class HardText(ResultModel):
    """A stretch of output where few drafts were accepted."""

    set: str = ""
    id: str = ""
    text_before: str = ""
    text: str
    acceptance_length: float | None = None
    num_drafts: Count = 0


class OutputSample(ResultModel):
    """An output in pieces, each "accepted" (drafts) or "target" (tokens of the target)."""

    set: str = ""
    id: str = ""
    acceptance_length: float | None = None
    prompt_tail: str = ""
    pieces: list[tuple[str, str]] = []


class AcceptanceFigures(ResultModel):
    """The acceptance of one way to decode: pooled, by part, and with texts."""

    pooled: Slice
    by_set: dict[str, Slice] = {}
    by_category: dict[str, Slice] = {}
    by_context: list[RangeSlice] = []
    by_output_position: list[RangeSlice] = []
    histogram: list[HistogramBin] = []
    loop_share: float | None = None
    # [drafts, accepted draft tokens, decode steps] of each conversation.
    by_conversation: dict[str, tuple[int, int, int]] = {}
    hardest: list[HardText] = []
    samples: list[OutputSample] = []


class EntryKey(ResultModel):
    """The settings that tell one entry from another."""

    method: str
    source: str = ""
    k: Count  # 0 where a server does not tell
    temperature: float = 0.0
    draft_sampling: str = "argmax"
    engine: str = "peagle"  # or "vllm", or the URL of a server

    def __str__(self) -> str:
        at = f" on {self.engine}" if self.engine != "peagle" else ""
        return f"{self.method}{at}, K={self.k or 'unknown'}, temperature {self.temperature:g}"


class Entry(AcceptanceFigures, EntryKey):
    """One method at one K and one temperature."""

    training: TrainingRecord | None = None
    seconds: float | None = None
    output_tokens_per_s: float | None = None
    num_errors: Count = 0
    notes: list[str] = []
    weights_sha256: str = ""
    created: str = ""
    parallel_drafting_spec: dict[str, int] | None = None  # shape of the trees that a head drafts

    @property
    def has_trees(self) -> bool:
        """Return whether drafts are trees: by their shape, or by more than K drafts in a step.

        Entries of servers and of an earlier peagle have no shape.
        """
        pooled = self.pooled
        has_more = self.k > 0 and pooled.num_draft_tokens > self.k * pooled.num_drafts
        return self.parallel_drafting_spec is not None or has_more

    @property
    def depth(self) -> int:
        """Return K, or the number of positions in the counters where a server does not tell K."""
        return self.k or len(self.pooled.num_accepted_tokens_per_pos)


class Comparison(ResultModel):
    """The paired difference of a figure of two methods on the same prompts."""

    method: str
    over: str
    k: Count
    temperature: float = 0.0
    engine: str = "peagle"
    measure: str
    difference: float
    ci: Interval | None = None
    num_requests: Count = 0


class AcceptanceResults(Document):
    """The contents of acceptance.json."""

    entries: list[Entry]
    turns: dict[str, Turns] = {}  # of the sets whose prompts have several
    comparisons: list[Comparison] = []
    advice: str = ""


# ---- throughput.json ----


class Percentiles(ResultModel):
    """Percentiles and mean of some seconds."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None


class RunFigures(TextFigures):
    """Speed and latency of one repeat of a cell, or the medians of its repeats."""

    seconds: float | None = None
    num_requests: Number | None = None
    num_tokens: Number | None = None
    output_tokens_per_s: Share
    requests_per_s: float | None = None
    ttft_s: Percentiles = Percentiles()
    itl_s: Percentiles = Percentiles()
    e2e_s: Percentiles = Percentiles()
    acceptance_length: float | None = None
    gpu_busy: float | None = None
    errors: Number = 0
    sitting: Number = 1  # of the command; each resumption is another one
    other_cores: float | None = None  # that other programs kept busy; of the engine here alone


class TouchedExperts(ResultModel):
    """Distinct experts that a decode step of a mixture touches, the mean over steps by layer."""

    per_layer: list[float]
    num_experts: Count  # in a layer
    num_steps: Count  # steps that were counted

    @property
    def mean(self) -> float:
        """Return the distinct experts of a step, the mean over layers too."""
        return fmean(self.per_layer)


class CellSpread(ResultModel):
    """Least and most of the repeats."""

    output_tokens_per_s: Interval | None = None


class Cell(ResultModel):
    """One method at one K and one concurrency on one prompt set."""

    method: str
    source: str = ""
    engine: str = "peagle"
    k: Count | None = None
    concurrency: Annotated[int, Field(ge=1)]
    set: str = ""
    repeats: list[RunFigures] = []
    median: RunFigures
    spread: CellSpread = CellSpread()
    speed_up_over_plain: float | None = None
    speed_up_over_eagle3: float | None = None
    linearity: float | None = None
    meets_objective: bool | None = None
    experts: TouchedExperts | None = None  # of mixtures in the engine here alone
    cost_per_million_tokens: float | None = None  # output tokens, at price_per_hour of the file
    instances: Count | None = None  # for requests_per_second of the file
    doubts: list[str] = []  # reasons why its speed is no result to be quoted

    @property
    def speed(self) -> float:
        """Return output tokens per second, the median of the repeats."""
        return self.median.output_tokens_per_s

    @property
    def speed_range(self) -> Interval:
        """Return the least and most output tokens per second of the repeats."""
        return self.spread.output_tokens_per_s or (self.speed, self.speed)


class BestK(ResultModel):
    """The best K of a method at one load, and every K that ties with the fastest."""

    method: str
    engine: str = "peagle"
    set: str = ""
    concurrency: int
    k: Count
    output_tokens_per_s: float | None = None
    tied_k: list[int] = []


class Goodput(ResultModel):
    """Most requests per second of a method at one K that keep the latency objective."""

    method: str
    engine: str = "peagle"
    k: Count | None = None
    set: str = ""
    requests_per_s: float | None = None
    concurrency: int | None = None


class ThroughputResults(Document):
    """The contents of throughput.json."""

    cells: list[Cell]
    best_k: list[BestK] = []
    goodput: list[Goodput] = []
    training: dict[str, TrainingRecord] = {}
    turns: dict[str, Turns] = {}  # of the sets whose prompts have several
    price_per_hour: float | None = None  # of the machine; the user's own
    requests_per_second: float | None = None  # that the user wants to serve
    doubts: list[str] = []  # reasons why no speed of the file is a result to be quoted
    advice: str = ""

    @property
    def has_many_k(self) -> bool:
        """Return whether several K were measured."""
        return len({cell.k for cell in self.cells if cell.k}) > 1

    def is_sound(self, cell: Cell) -> bool:
        """Return whether nothing speaks against the speeds at the load of a cell."""
        load = cell.set, cell.concurrency
        return not self.doubts and not any(
            one.doubts for one in self.cells if (one.set, one.concurrency) == load
        )

    def cost_per_hour(self, cell: Cell) -> float | None:
        """Return the price of the instances of a cell for an hour; None if either is unknown."""
        price = self.price_per_hour
        return price * cell.instances if price and cell.instances else None


# ---- tune.json ----


class TunedExperts(ResultModel):
    """Distinct experts that a decode step of a mixture touches, means over steps and layers."""

    num_experts: Count  # in a layer
    num_chosen: Count  # for a token
    touched: list[tuple[int, int, float, float]]  # batch, K, measured, under even routing


class TunedCosts(ResultModel):
    """Measured seconds of decode steps and of their parts."""

    target_s: list[tuple[Number, float]] = []  # tokens in the pass, seconds
    draft_s: list[tuple[Number, float]] = []  # rows in the pass, seconds
    step_s: list[tuple[int, int, float, bool]] = []  # batch, K, seconds, whether it was fitted
    spread: float | None = None
    experts: TunedExperts | None = None  # of mixtures alone

    @property
    def passes(self) -> list[tuple[str, str, list[tuple[int, float]]]]:
        """Return title, unit and ascending (size, milliseconds) of each timed kind of pass."""
        return [
            (title, unit, sorted((max(1, round(size)), 1000 * time) for size, time in costs))
            for title, unit, costs in (
                ("Target pass", "tokens in the pass", self.target_s),
                ("Drafter pass", "rows in the pass", self.draft_s),
            )
            if costs
        ]


class TunedAcceptance(ResultModel):
    """Acceptance length by K, and the K at which it was measured."""

    source: str = ""
    acceptance_length: dict[int, float] = {}
    measured_k: list[int] = []


class Prediction(ResultModel):
    """Tokens per second at one batch size and K."""

    batch: Annotated[int, Field(ge=1)]
    k: Count
    predicted_tokens_per_s: Share
    measured_tokens_per_s: Share | None = None
    fitted: bool = False


class PredictionCheck(ResultModel):
    """How far predictions are off at the cells that were not fitted."""

    num_unfitted: Count = 0
    within_10_percent: Number | None = None
    share: float | None = None
    worst: float | None = None


class BreakEven(ResultModel):
    """The acceptance length from which drafting is faster than not drafting."""

    batch: Annotated[int, Field(ge=1)]
    k: Count
    acceptance_length: float


class TunedTrees(TextFigures):
    """Candidate trees of one shape."""

    parallel_drafting_spec: dict[str, int]
    acceptance_length: float
    tokens_per_s: list[tuple[int, float]]  # batch, measured
    wins_at: list[int] = []  # batch sizes at which neither chains nor other trees are as fast


class TuneResults(Document):
    """The contents of tune.json."""

    costs: TunedCosts = TunedCosts()
    acceptance: TunedAcceptance = TunedAcceptance()
    predictions: list[Prediction] = []
    check: PredictionCheck = PredictionCheck()
    schedule: list[tuple[int, int, int]] = []  # first and last batch size, K
    threshold: float | None = None
    best_single_k: Count | None = None
    speculative_config: dict[str, dict[str, Any] | None] = {}
    break_even: list[BreakEven] = []
    trees: list[TunedTrees] = []
    drawn_chain_length: float | None = None  # of files of earlier versions

    @field_validator("schedule")
    @classmethod
    def _ascends(cls, schedule: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        ends = [end for low, high, _ in schedule for end in (low, high + 1)]
        if any(k < 0 for *_, k in schedule) or [1, *ends] != sorted([1, *ends]):
            raise ValueError("expected ascending ranges of batch sizes from 1, each with a K")
        return schedule


# ---- certificate.json ----

CaseStatus = Literal["passed", "near-ties", "fault", "not applicable"]


class Difference(ResultModel):
    """The first token at which an output leaves the reference; a token is None at an end."""

    prompt: str
    position: Count
    reference_token: int | None = None
    token: int | None = None
    # Logit of the reference's token minus that of ours, and minus the next best.
    gap: float | None = None
    top2_gap: float | None = None
    bound: float  # gaps below it are near-ties

    @computed_field
    @property
    def is_near_tie(self) -> bool:
        """Return whether rounding alone can explain the difference: both gaps are below it."""
        if self.gap is None or self.top2_gap is None:
            return False
        return self.gap < self.bound and self.top2_gap < self.bound


class CertifiedCase(ResultModel):
    """One feature under one way to decode, greedy, against the reference.

    `differences` has the first one of each output, `faults` names others in words, and `note` says
    why a case is not applicable.
    """

    feature: str
    method: str
    num_outputs: Count = 0
    num_tokens: Count = 0
    num_accepted_tokens: Count = 0
    differences: list[Difference] = []
    faults: list[str] = []
    note: str = ""

    @computed_field
    @property
    def status(self) -> CaseStatus:
        """Return the status: passed, passed but for near-ties, fault, or not applicable."""
        if self.num_faults:
            return "fault"
        if not self.num_outputs:
            return "not applicable"
        return "near-ties" if self.differences else "passed"

    @computed_field
    @property
    def num_near_ties(self) -> int:
        """Return the number of outputs whose first difference is a near-tie."""
        return sum(one.is_near_tie for one in self.differences)

    @computed_field
    @property
    def num_faults(self) -> int:
        """Count the outputs whose first difference is no near-tie, and other faults."""
        return len(self.differences) - self.num_near_ties + len(self.faults)


class SampledTest(ResultModel):
    """Pearson's test of the first tokens of one prompt's outputs under one way to decode."""

    method: str
    draft_sampling: str = ""
    prompt: str
    num_tokens: Count
    num_samples: Count
    num_cells: Count
    statistic: float | None = None  # X2; None where an output came that cannot come
    p_value: float
    detectable_shift: float
    significance: float  # a p-value below it is a fault
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0

    @computed_field
    @property
    def passed(self) -> bool:
        """Return whether the p-value is at least the significance."""
        return self.p_value >= self.significance


class CertificateResults(Document):
    """certificate.json: greedy outputs, the feature matrix and the tests of distributions."""

    identity: list[CertifiedCase]
    matrix: list[CertifiedCase] = []
    distribution: list[SampledTest] = []
    seconds: float

    @computed_field
    @property
    def passed(self) -> bool:
        """Return whether there is no fault; near-ties are none."""
        return not self.faults

    @computed_field
    @property
    def faults(self) -> list[str]:
        """Return the faults, each in a line."""
        return [
            f"{case.feature}, {case.method}: {_faults_of(case)}"
            for case in [*self.identity, *self.matrix]
            if case.status == "fault"
        ] + _sampling_faults(self.distribution)


class ServedCase(ResultModel):
    """Greedy answers of a server under one condition.

    `num_asked_again` positions were asked again with all before them as the prompt, and
    `num_scored_anew` tokens were scored as a part of a prompt. Of `num_unjudged` tokens the server
    lists fewer likeliest tokens than of others, as where several have one name: a likelier token
    may be missing.
    """

    condition: str
    num_answers: Count = 0
    num_tokens: Count = 0
    num_cached_tokens: Count = 0  # prompt tokens from the server's cache, as far as it says
    num_asked_again: Count = 0
    num_scored_anew: Count = 0
    num_near_ties: Count = 0
    num_unjudged: Count = 0
    faults: list[str] = []


class ServedCertificate(Document):
    """certificate.json of a server; `error` says why it is not complete, "" if it is."""

    conditions: list[ServedCase] = []
    distribution: list[SampledTest] = []
    num_draft_tokens: Count | None = None
    num_accepted_tokens: Count | None = None
    notes: list[str] = []
    error: str = ""
    seconds: float = 0.0

    @computed_field
    @property
    def passed(self) -> bool:
        """Return whether the certificate is complete and has no fault; near-ties are none."""
        return not self.faults and not self.error

    @computed_field
    @property
    def faults(self) -> list[str]:
        """Return the faults, each in a line."""
        greedy = [f"{case.condition}: {fault}" for case in self.conditions for fault in case.faults]
        return greedy + _sampling_faults(self.distribution)


def _sampling_faults(tests: list[SampledTest]) -> list[str]:
    return [
        f"sampling, {test.method} {test.draft_sampling}".rstrip()
        + f", {test.prompt}: p = {test.p_value:.2g}, below {test.significance:.2g}"
        for test in tests
        if not test.passed
    ]


def _faults_of(case: CertifiedCase) -> str:
    found = list(case.faults)
    if wrong := [one for one in case.differences if not one.is_near_tie]:
        one = wrong[0]
        gap = "" if one.gap is None else f", gap {one.gap:.3g}"
        found.append(
            f"{len(wrong)} of {case.num_outputs} outputs differ; {one.prompt} at token "
            f"{one.position}: {one.token} in place of {one.reference_token}{gap}"
        )
    return "; ".join(found)


# ---- reading ----

AnyDocument = TypeVar("AnyDocument", bound=Document)


def read_document(path: Path, model: type[AnyDocument]) -> AnyDocument:
    """Read one of the files.

    Raises:
        UserError: the file is not readable, malformed (the message names the key), or newer.
    """
    return parse_document(path, read_json_object(path), model)


def parse_document(path: Path, data: dict[str, Any], model: type[AnyDocument]) -> AnyDocument:
    """Check the object that a file holds; `path` names it in messages.

    Raises:
        UserError: it is malformed (the message names the key), or newer.
    """
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(
            f"{str(path)!r} is malformed at format_version: it is {version!r}; expected a whole "
            "number from 1."
        )
    if version > FORMAT_VERSION:
        raise UserError(
            f"{str(path)!r} has format_version {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Update peagle."
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole file"
        given = repr(first["input"])
        given = given if len(given) <= 60 else given[:57] + "..."
        raise UserError(
            f"{str(path)!r} is malformed at {key}: {first['msg']} (it holds {given}). "
            "Run its command again."
        ) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        UserError: it is not readable, or holds something else.
    """
    try:
        data = json.loads(path.read_bytes().decode())
    except OSError as error:
        problem = f"is not readable: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text; expected JSON"
    except RecursionError:
        problem = "is nested too deeply to be a result"
    except ValueError as error:
        problem = f"is not JSON: {error}. Run its command again"
    else:
        if isinstance(data, dict):
            return data
        problem = f"holds {type(data).__name__}; expected a JSON object"
    raise UserError(f"{str(path)!r} {problem}.")
