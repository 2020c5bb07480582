"""What eval, bench and tune write, as far as the report reads it.

Keys that the report has no use for are left alone; a key that may be empty may also be missing or
null, so that a server which tells less gives a shorter report and no error.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from peagle.evaluation.training_record import TrainingRecord

FORMAT_VERSION = 1

Interval = tuple[float, float]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]


class Record(BaseModel):
    """An object of one of the files; null stands for what its key is by default."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {n for n, field in cls.model_fields.items() if not field.is_required()}
        return {k: v for k, v in data.items() if v is not None or k not in optional}


def _text(value: Any) -> Any:
    return "" if value is None else value


class Provenance(Record):
    """Where the numbers of a file come from."""

    model_config = ConfigDict(extra="allow", frozen=True)

    command: str = ""
    created: str = ""
    environment: dict[str, Any] = {}
    target: str
    dtype: Annotated[str, BeforeValidator(_text)] = ""
    synthetic: Any = False


class Document(Record):
    """What every file has."""

    provenance: Provenance
    settings: dict[str, Any] = {}


# ---- acceptance.json ------------------------------------------------------------------------


class Slice(Record):
    """Pooled counters of some of the requests and what follows from them."""

    num_requests: Count = 0
    num_tokens: Count = 0
    num_drafts: Count
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count
    num_accepted_tokens_per_pos: list[Count] = []
    acceptance_length: float | None
    acceptance_length_ci: Interval | None = None
    unconditional: list[float] = []
    unconditional_ci: list[Interval | None] = []
    conditional: list[float | None] = []
    conditional_ci: list[Interval | None] = []
    tokens_per_step: float | None = None
    loop_share: float | None = None
    acceptance_length_before_loop: float | None = None

    @property
    def length(self) -> float | None:
        """The acceptance length; None where nothing was drafted."""
        return self.acceptance_length if self.num_drafts else None


class RangeSlice(Record):
    """The drafts that began with so much context, or so far into the output."""

    first: float = Field(alias="from")
    last: float = Field(alias="to")
    slice: Slice


class Bin(Record):
    """Requests whose acceptance length lies in [first, last)."""

    first: float = Field(alias="from")
    last: float = Field(alias="to")
    count: Count


class Hard(Record):
    """A stretch of output where few drafts were accepted."""

    set: str = ""
    id: str = ""
    text_before: str = ""
    text: str
    acceptance_length: float | None = None
    num_drafts: Count = 0


class SampleRecord(Record):
    """An output in pieces, each with who wrote it."""

    set: str = ""
    id: str = ""
    acceptance_length: float | None = None
    prompt_tail: str = ""
    pieces: list[tuple[str, str]] = []


class Entry(Record):
    """One method at one K and one temperature."""

    method: str
    source: str = ""
    k: Count
    temperature: float = 0.0
    draft_sampling: str = ""
    engine: str = "peagle"
    pooled: Slice
    by_set: dict[str, Slice] = {}
    by_category: dict[str, Slice] = {}
    by_context: list[RangeSlice] = []
    by_output_position: list[RangeSlice] = []
    histogram: list[Bin] = []
    loop_share: float | None = None
    training: TrainingRecord | None = None
    hardest: list[Hard] = []
    samples: list[SampleRecord] = []

    @property
    def depth(self) -> int:
        """K, or where a server does not tell it, the positions that its counters have."""
        return self.k or len(self.pooled.num_accepted_tokens_per_pos)


class Comparison(Record):
    """Two methods on the same prompts: the paired difference of their figures."""

    method: str
    over: str
    k: Count
    temperature: float = 0.0
    engine: str = "peagle"
    measure: str
    difference: float
    ci: Interval | None = None
    num_requests: Count = 0


class AcceptanceRecord(Document):
    """acceptance.json."""

    entries: list[Entry]
    comparisons: list[Comparison] = []


# ---- throughput.json ------------------------------------------------------------------------


class Percentiles(Record):
    """Of seconds."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None


class Measures(Record):
    """One repeat of a cell, or the median of its repeats."""

    seconds: float | None = None
    num_requests: float | None = None
    num_tokens: float | None = None
    output_tokens_per_s: Share
    requests_per_s: float | None = None
    ttft_s: Percentiles = Percentiles()
    itl_s: Percentiles = Percentiles()
    e2e_s: Percentiles = Percentiles()
    acceptance_length: float | None = None
    gpu_busy: float | None = None
    errors: float = 0


class Spread(Record):
    """Least and most of the repeats."""

    output_tokens_per_s: Interval | None = None


class CellRecord(Record):
    """One method at one K and one concurrency on one prompt set."""

    method: str
    source: str = ""
    engine: str = "peagle"
    k: Count | None = None
    concurrency: Annotated[int, Field(ge=1)]
    set: str = ""
    repeats: list[Measures] = []
    median: Measures
    spread: Spread = Spread()
    speed_up_over_plain: float | None = None
    speed_up_over_eagle3: float | None = None
    linearity: float | None = None
    meets_objective: bool | None = None


class Goodput(Record):
    """Most requests per second that still meet the latency objective."""

    method: str
    k: Count | None = None
    set: str = ""
    requests_per_s: float | None = None
    concurrency: int | None = None


class ThroughputFile(Document):
    """throughput.json."""

    cells: list[CellRecord]
    training: dict[str, TrainingRecord] = {}
    goodput: list[Goodput] = []


# ---- tune.json ------------------------------------------------------------------------------


class CostsRecord(Record):
    """Measured seconds of the parts of a step."""

    target_s: list[tuple[float, float]] = []
    draft_s: list[tuple[float, float]] = []


class TunedAcceptance(Record):
    """Acceptance length by K."""

    source: str = ""
    acceptance_length: dict[int, float] = {}


class Prediction(Record):
    """Tokens per second at one batch size and K."""

    batch: Annotated[int, Field(ge=1)]
    k: Count
    predicted_tokens_per_s: Share
    measured_tokens_per_s: Share | None = None
    fitted: bool = False


class CheckRecord(Record):
    """How the predictions stand up to cells that were not fitted."""

    num_unfitted: Count = 0
    within_10_percent: float | None = None
    share: float | None = None
    worst: float | None = None


class BreakEven(Record):
    """The acceptance length from which a head pays."""

    batch: Annotated[int, Field(ge=1)]
    k: Count
    acceptance_length: float


class TuneFile(Document):
    """tune.json."""

    costs: CostsRecord = CostsRecord()
    acceptance: TunedAcceptance = TunedAcceptance()
    predictions: list[Prediction] = []
    check: CheckRecord = CheckRecord()
    schedule: list[tuple[int, int, int]] = []
    break_even: list[BreakEven] = []
    speculative_config: dict[str, Any] = {}

    @field_validator("schedule")
    @classmethod
    def _ascends(cls, schedule: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        ends = [end for low, high, _ in schedule for end in (low, high + 1)]
        if any(k < 0 for *_, k in schedule) or [1, *ends] != sorted([1, *ends]):
            raise ValueError("expected ascending ranges of batch sizes from 1, each with a K")
        return schedule
