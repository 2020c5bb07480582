"""Adapting a head to traffic and testing it, for `peagle adapt` and `deploy sagemaker adapt`."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import typer

from peagle.cli import groups
from peagle.cli.data_prepare import lm_head_of, load_tokenizer_of
from peagle.cli.flags import Given, pick_flags, refuse_idle
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import Layer, Settings
from peagle.cli.setup import check_paths, note, quiet_libraries, set_threads
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.config.checks import require_writable_folder
from peagle.config.engine import TARGET_DEFAULTS
from peagle.data.limits import Limits, check_limits
from peagle.data.readers import check_traffic
from peagle.data.recorded import read_cipher
from peagle.disk import needing_room
from peagle.errors import UserError
from peagle.models.head_json import default_k

if TYPE_CHECKING:
    from peagle.data.prepare import Collected
    from peagle.data.readers import DropCounts
    from peagle.data.traffic import RecordedTurn
    from peagle.evaluation.adaptation import AcceptanceChange, OwnOutputs
    from peagle.training.adaptation import Adaptation

REFUSED = 3  # exit status
_HELD_OUT_SHARE = 0.1
_VALIDATION_SHARE = 0.1  # of what is trained on; chooses the best step


@dataclass(frozen=True)
class PlaceOptions:
    """The models of `adapt`, its traffic and its output."""

    head: str = typer.Argument(
        ..., metavar="HEAD", help="The head to adapt: a folder, a hub id, bundled or smollm2."
    )
    target: str = typer.Option(
        ..., help="Its target: a folder, a GGUF file, a hub id, bundled or smollm2."
    )
    traffic: Path = typer.Option(
        ...,
        metavar="DIR",
        help="Folder of records of `peagle serve --record`, or of SageMaker's data capture.",
    )
    output: Path = typer.Option(..., "--output", "-o", help="New folder for the new head.")
    record_key_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Key file of the server that encrypted the records.",
        show_default=False,
    )


@dataclass(frozen=True)
class TrainingOptions:
    """How a head is adapted and tested: the options that `deploy sagemaker adapt` has too."""

    what: Literal["correction", "head"] = typer.Option(
        "correction",
        help="Fit the correction of the head, which stays as it is; or go on training the head, "
        "and fit a correction behind it.",
    )
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode of captured conversations; needed if the chat template has one.",
        show_default=False,
    )
    old: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Data of what the head does well now, as `peagle data prepare` writes them "
        "(.safetensors): a tenth tests for forgetting, the rest is mixed in.",
        show_default="forgetting is not tested",
    )
    old_share: float = typer.Option(0.5, help="Share of --old in the tokens to train on.")
    max_loss: float = typer.Option(
        0.02, help="Largest share of the acceptance length on old data that may be lost."
    )
    minutes: float = typer.Option(5.0, help="Minutes of training steps, at most.")
    steps: int | None = typer.Option(
        None,
        min=1,
        help="Steps of each training, in place of --minutes: the same again gives the same head.",
        show_default="what fits into --minutes, a few epochs at most",
    )
    max_length: int = typer.Option(2048, help="Tokens at which longer records are cut.")
    seed: int = typer.Option(0, min=0, max=(1 << 63) - 1, help="Seed of training and of intervals.")
    overrides: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Value of the training configuration; may be repeated.",
    )

    def check(self, context: typer.Context) -> None:
        """Refuse values that are out of range or have no effect, and old data that is missing.

        Raises:
            UserError: naming the option.
        """
        old = self.old
        if not 0 < self.minutes < math.inf:
            raise UserError(f"--minutes is {self.minutes:g}; expected a finite number above 0.")
        if not 0 < self.max_loss < 1:
            raise UserError(f"--max-loss is {self.max_loss:g}; expected a share, as 0.02.")
        if not 0 <= self.old_share < 1:
            raise UserError(
                f"--old-share is {self.old_share:g}; expected at least 0 and less than 1."
            )
        check_limits(self.max_length, 0.0)
        if old is None and self.what == "head" and self.old_share:
            raise UserError(
                "--what head trains all of the head and --old was not given; expected data of what "
                "it does well now, against forgetting. Name them with --old FILE, or give "
                "--old-share 0."
            )
        if old is None:
            idle = ["max_loss"] + ["old_share"] * bool(self.old_share)
            refuse_idle(context, idle, "without --old", "add --old FILE")
        if self.steps is not None:
            refuse_idle(context, ["minutes"], "beside --steps", "leave --steps out")
        if old is not None and not (old.is_file() and old.suffix == ".safetensors"):
            raise UserError(
                f"--old is {str(old)!r}; expected a .safetensors file that `peagle data prepare` "
                "wrote."
            )


ENGINE = (
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.device"),
    *pick_flags(groups.ENGINE, "engine.max_model_len", "engine.kv_cache_gib"),
    *pick_flags(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
)


def adapted(
    given: Given,
    places: PlaceOptions,
    options: TrainingOptions,
    *,
    k: int | None = None,
    with_correction: bool = True,
) -> dict[str, Any]:
    """Adapt a head and test it; return the result as JSON, with a `refusal` if it did not pass.

    Args:
        given: options of the engine and `threads`.
        places, options: checked by `TrainingOptions.check`.
        k: draft tokens of the measured steps; None takes what the head was trained for.
        with_correction: whether the head is served with its correction.

    Raises:
        UserError: head, target, traffic or configuration are not usable.
    """
    plan = _plan(given, places, options, k, with_correction=with_correction)
    # As Ctrl-C: the texts of the traffic do not stay beside --output.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _hang_up)
    with ProgressLine("step") as line:
        data = _read(plan, options, line)
        return _adapt(plan, options, data, line)


def _hang_up(number: int, frame: object) -> None:
    """Interrupt the command once: a terminal that closes sends SIGHUP more than once."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def refuse(result: Mapping[str, Any]) -> None:
    """End the command with status 3 if the gate refused the head."""
    if result["refusal"]:
        print(f"peagle: refused: {result['refusal']}", file=sys.stderr)
        raise typer.Exit(REFUSED)


# ---- the plan and the data ----


@dataclass(frozen=True, slots=True)
class AdaptPlan:
    """The models, found, the traffic with the cipher of its records, the output, the training."""

    head: Path
    target: Path
    traffic: Path
    output: Path
    k: int
    with_correction: bool
    engine: EngineConfig
    engine_options: dict[str, Any]
    cipher: Any
    adaptation: Adaptation


def _plan(
    given: Given,
    places: PlaceOptions,
    options: TrainingOptions,
    k: int | None,
    *,
    with_correction: bool,
) -> AdaptPlan:
    """Check the places and find the models."""
    output = places.output
    if output.exists():
        raise UserError(f"--output {str(output)!r} is there already; name a new folder.")
    require_writable_folder(output, "--output")
    check_traffic(places.traffic)
    check_paths(places.target, places.head)
    cipher = read_cipher(places.record_key_file) if places.record_key_file else None
    settings = Settings(Layer(dict(given)))
    engine = settings.build("engine")
    from peagle.models.loading import resolve_model

    target, head = resolve_model(places.target), resolve_model(places.head, role="draft")
    set_threads(given.value("threads"))
    quiet_libraries()
    from peagle.engine.placement import resolve_device
    from peagle.training.adaptation import Adaptation, check_adaptable

    depth = check_adaptable(head, options.what).trained_depth
    adaptation = Adaptation(
        options.what,
        head,
        target,
        resolve_device(engine.device),
        options.seed,
        options.minutes,
        options.steps,
        options.overrides or (),
        with_correction,
    )
    adaptation.configs(output, options.max_length)  # refuses --set before the traffic is read
    own = {name: asdict(engine)[name] for name in settings.section("engine")}
    return AdaptPlan(
        head,
        target,
        places.traffic,
        output,
        k or default_k(depth),
        with_correction,
        engine,
        own | TARGET_DEFAULTS,
        cipher,
        adaptation,
    )


@dataclass(frozen=True, slots=True)
class AdaptData:
    """The data of training, and the turns that are measured."""

    turns: list[RecordedTurn]
    train: Collected
    validation: Collected
    held_out: list[RecordedTurn]
    old: list[RecordedTurn]
    old_validation: list[RecordedTurn]  # that choose how much of a fitted correction is kept
    facts: dict[str, Any]
    counts: dict[str, Any]


def _read(plan: AdaptPlan, options: TrainingOptions, line: ProgressLine) -> AdaptData:
    """Read the traffic and the old data, and split both."""
    line.begin("reading the traffic")
    from peagle.data.prepare import Collected, prepare
    from peagle.data.readers import tokenizer_sha256
    from peagle.data.samples import SampleMaker, vocab_size_of
    from peagle.data.traffic import collect, hold_out, read_traffic, turns_of
    from peagle.evaluation.adaptation import MIN_CONVERSATIONS, measured
    from peagle.models.end_tokens import eos_token_ids

    folder, tokenizer = load_tokenizer_of(str(plan.target))
    digest = tokenizer_sha256(folder, tokenizer)
    limits = Limits(vocab_size_of(folder, tokenizer), options.max_length)
    ends = eos_token_ids(folder, tokenizer)
    maker = SampleMaker(tokenizer, ends, thinking=options.thinking)
    turns, dropped = read_traffic(
        plan.traffic, limits, digest, maker, lm_head=lm_head_of(folder), cipher=plan.cipher
    )
    learned, held_out = hold_out(turns, _HELD_OUT_SHARE)
    held_out = measured(held_out)
    num_held_out = len({turn.conversation for turn in held_out})
    if num_held_out < MIN_CONVERSATIONS:
        raise UserError(
            f"The traffic in {str(plan.traffic)!r} holds {len(turns)} usable requests, whose "
            f"newest tenth is of {num_held_out} conversations; a verdict needs at least "
            f"{MIN_CONVERSATIONS} there, about {round(MIN_CONVERSATIONS / _HELD_OUT_SHARE)} in "
            f"all{_left_out(dropped)}. Record more, and run the command again."
        )
    collected = collect(learned, limits)
    if len(set(collected.hashes)) < 2:
        raise UserError(
            f"--max-length is {options.max_length}, within which {len(collected)} requests of the "
            f"traffic in {str(plan.traffic)!r} are; expected two conversations or more. Raise it, "
            "or record more."
        )
    train, validation = collected.split(_VALIDATION_SHARE)
    old: list[RecordedTurn] = []
    old_validation: list[RecordedTurn] = []
    num_old = 0
    if options.old is not None:
        more, tested, _ = prepare([options.old], SampleMaker(None), limits, digest)
        if len(set(more.hashes)) > 1:
            more, tested = more.split(_HELD_OUT_SHARE)
        old = measured(turns_of(tested))
        if len(old) < MIN_CONVERSATIONS:
            raise UserError(
                f"--old {str(options.old)!r} holds {len(more) + len(tested)} samples, of which "
                f"{len(old)} test for forgetting; expected at least {MIN_CONVERSATIONS}, about "
                f"{round(MIN_CONVERSATIONS / _HELD_OUT_SHARE)} in all. Give more data."
            )
        # A fit from a fresh start has nothing in common with the old correction.
        configs = plan.adaptation.configs(plan.output, options.max_length)
        if options.what == "correction" and configs["correction"].correction.start == "present":
            # The hashes of the first tenth are in `tested`.
            more, chooses = more.split(_HELD_OUT_SHARE + _VALIDATION_SHARE)
            old_validation = measured(turns_of(chooses))
        mixed = Collected()
        mixed.extend(train, range(len(train)))
        wanted = train.num_tokens * options.old_share / (1 - options.old_share)
        mixed.extend(more, _some(more, wanted, options.seed))
        num_old, train = len(mixed) - len(train), mixed
    else:
        note("--old was not given, so forgetting is not tested")
    facts = {"kind": "adapt", "tokenizer_sha256": digest, "command": " ".join(sys.argv[1:])}
    counts = {
        "requests": len(turns),
        "dropped": dict(dropped.dropped),
        "trained_on": len(train) - num_old,
        "old_trained_on": num_old,
        "held_out": len(held_out),
    }
    return AdaptData(turns, train, validation, held_out, old, old_validation, facts, counts)


def _left_out(counts: DropCounts) -> str:
    reasons = "; ".join(counts.reasons())
    return f" (left out: {reasons})" if reasons else ""


def _some(collected: Collected, num_tokens: float, seed: int) -> list[int]:
    """Return the numbers of random samples that have so many tokens together, all at most."""
    import numpy as np

    chosen: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(collected)).tolist():
        if num_tokens <= 0:
            break
        num_tokens -= len(collected.tokens[index])
        chosen.append(index)
    return sorted(chosen)


# ---- the run ----

Measured = dict[str, dict[str, tuple[int, int]]]  # `accepted_drafts` of each side


def _adapt(
    plan: AdaptPlan, options: TrainingOptions, data: AdaptData, line: ProgressLine
) -> dict[str, Any]:
    """Measure, train, measure again; return the result."""
    from peagle.evaluation.adaptation import AcceptanceChange, refusal
    from peagle.models.checkpoint import blend_back

    result: dict[str, Any] = {
        "head": None,
        "refusal": "",
        "what": options.what,
        "k": plan.k,
        "requests": data.counts,
        "steps": {},
        "held_out": None,
        "old": None,
        "old_validation": None,
        "kept_share": 1.0,
        "served": None,
    }
    before, own = _measure(plan, plan.head, data, "the old head", line, with_test=True)
    result["own_outputs"] = asdict(own)
    if own.refusal:
        return result | {"refusal": own.refusal}
    output = plan.output
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as work:
        new, result["steps"] = plan.adaptation.run(
            data.train,
            data.validation,
            data.facts,
            Path(work),
            line.begin,
            lambda step, steps: line.update(step, steps, "", line=f"step {step}/{steps}"),
        )
        changes: dict[str, AcceptanceChange] = {}
        shares = blend_back(new, plan.head) if data.old_validation else iter([1.0])
        for share in shares:
            result["kept_share"] = share
            after, _ = _measure(plan, new, data, "the new head", line)
            changes = {
                name: AcceptanceChange.of(before[name], after[name], seed=options.seed)
                for name in before
            }
            chooses = changes.get("old_validation")
            # Half of what the gate allows: other data will lose another share.
            if chooses is None or chooses.loss < options.max_loss / 2:
                break
        result |= {name: change.to_json() for name, change in changes.items()}
        result["refusal"] = refusal(changes["held_out"], changes.get("old"), options.max_loss)
        if not result["refusal"]:
            try:
                new.rename(output)
            except OSError as error:
                kept = new.rename(output.with_name(Path(work).name[1:]))
                raise UserError(
                    f"--output {str(output)!r} was made by another process meanwhile "
                    f"({error.strerror}); the new head is in {str(kept)!r}."
                ) from None
            result["head"] = str(output)
    return result


def _measure(
    plan: AdaptPlan,
    head: Path,
    data: AdaptData,
    who: str,
    line: ProgressLine,
    *,
    with_test: bool = False,
) -> tuple[Measured, OwnOutputs]:
    """Return the accepted drafts of a head on held-out traffic, and on old data if there are.

    `with_test` tests first that outputs belong to their prompts, and measures only if they do.
    """
    line.begin("loading the target and the head")
    from peagle.engine.placement import load_target
    from peagle.evaluation.adaptation import OwnOutputs, accepted_drafts, own_outputs
    from peagle.evaluation.engine_backend import open_engine

    sides = {"held_out": data.held_out, "old": data.old, "old_validation": data.old_validation}
    sides = {name: turns for name, turns in sides.items() if turns}
    found, own = {}, OwnOutputs(0, 0)
    target = load_target(plan.target, plan.engine)
    config = SpeculativeConfig(
        model=str(head), num_speculative_tokens=plan.k, correction=plan.with_correction
    )
    with open_engine(target, config, **plan.engine_options) as backend:
        if with_test:
            line.begin("testing that outputs belong to their prompts")
            own = own_outputs(backend.llm, data.turns)
        if not own.refusal:
            line.begin(f"measuring {who}")
            found = {name: accepted_drafts(backend.llm, turns) for name, turns in sides.items()}
        del backend  # its memory is released with the context
    return found, own


def write_figures(path: Path, result: Mapping[str, Any], advice: str) -> None:
    """Write the result of `adapted` as JSON; `advice` says what stays if the disk is full."""
    with needing_room(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def figures(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the acceptance lengths; [] if nothing was measured."""
    lines: list[str] = []
    for name, title in (("held_out", "held-out traffic"), ("old", "old data")):
        if (found := result[name]) is not None:
            if not lines:
                lines = [
                    f"acceptance length before loops, greedy, K = {result['k']}",
                    f"{'':<18}{'conversations':>13}{'old':>8}{'new':>8}{'gain':>9}  95% interval",
                ]
            ends = found["gain_ci"]
            shown = "-" if ends is None else f"{ends[0]:+.3f} to {ends[1]:+.3f}"
            lines.append(
                f"{title:<18}{found['num_conversations']:>13}"
                f"{found['acceptance_length_before']:>8.3f}"
                f"{found['acceptance_length_after']:>8.3f}{found['gain']:>+9.3f}  {shown}"
            )
    if (share := result.get("kept_share", 1)) < 1:  # earlier reports have none
        lines.append(f"{share:.0%} of the fit is kept; all of it lost too much on old data")
    return lines
