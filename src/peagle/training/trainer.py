"""The training loop: one optimizer step after another, validated, saved, exactly resumable."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.config import require_writable_folder
from peagle.data.batches import Batch, BatchStream, ValidationStream
from peagle.data.features import TargetStates
from peagle.disk import locked
from peagle.engine.placement import resolve_dtype
from peagle.environment import environment
from peagle.model_folder import sha256_of
from peagle.models.checkpoint import (
    CORRECTION_NAME,
    LENGTH_KEY,
    head_identity,
    save_correction,
    save_drafter,
    write_json,
)
from peagle.models.checkpoint.ends import has_target_ends
from peagle.models.checkpoint.packed import Rounding
from peagle.models.checkpoint.weights import WEIGHTS_NAME
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.head_json import RECORD_NAME
from peagle.models.target_facts import TargetShape
from peagle.training.checkpoint_facts import (
    config_facts,
    continued,
    read_record,
    refuse_earlier_run,
    require_steps_left,
)
from peagle.training.config import TrainConfig
from peagle.training.distributed import ONE_PROCESS, Processes
from peagle.training.element_attention import dense_attention, flex_attention
from peagle.training.inputs import Inputs
from peagle.training.optimizers import build_masters, build_optimizers
from peagle.training.overfitting import epochs_warning, rising_validation
from peagle.training.reporting import (
    History,
    Selection,
    TrainingReport,
    ValidationWindow,
    Window,
    require_finite,
)
from peagle.training.start_checks import require_room
from peagle.training.state import load_state, recover_state, save_state
from peagle.training.step import GradedElements, Objective, TrainingStep
from peagle.training.step_memory import (
    BatchShape,
    Budget,
    MemoryProbe,
    PeakMemory,
    TrainingShape,
    choose_memory,
    kernels_of,
    step_ways,
)
from peagle.training.training_methods import TrainingMethod
from peagle.training.vocabulary import vocabulary_report

_COD_SEED = 7_919
# Steps that are measured to plan a run, after those in which kernels compile.
_MEASURED_STEPS = 8
_COMPILING_STEPS = 2
_MEASURED_SHARE = 0.02  # of the run's minutes: long steps are measured fewer times
_CORRECTION_FACTS = ("peagle", "commit", "command", "data_sha256", "steps")


class TrainingStopped(Exception):
    """A requested stop: the checkpoint holds the step that was reached."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped at step {step} of {steps}; continue with --resume")


class Trainer:
    """Trains one head, with its correction where `correction.train` is "together"; or where
    `correction.on` names a head, the correction of that head.

    The loss has one denominator for the whole batch; all randomness is a function of (seed, step),
    so a resumed run takes the very steps that an uninterrupted one would have taken. All processes
    make a trainer and call the same methods; the first one calls `report`. `begin` receives
    the name of what the trainer begins to do, `stepped` the number of each step that is done.
    `clock` gives the seconds by which the run is timed and `run.minutes` plans its steps.

    Settings left open in the configuration come from the checkpoint in the output folder
    (`checkpoint_facts.continued`).

    Raises:
        UserError: target, data or configuration are not usable.
    """

    def __init__(
        self,
        config: TrainConfig,
        report: Callable[[TrainingReport], None] = lambda _: None,
        processes: Processes = ONE_PROCESS,
        *,
        begin: Callable[[str], None] = lambda _: None,
        stepped: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config = continued(config)
        self._clock = clock
        self.report, self._begin, self._stepped = report, begin, stepped
        self.processes = processes
        run = config.run
        self.history = History(config.output, write=processes.is_first)
        self.device = processes.device(run.device)
        if self.device.type == "cuda":
            # For a frozen target in float32: TF32 products are twice as exact as bfloat16 ones.
            torch.set_float32_matmul_precision("high")
        budget = Budget.of(run, self.device)
        begin("loading the target, reading the data")
        self.inputs = Inputs.load(config, self.device)
        self.target, data = self.inputs.target, config.data
        self._fingerprint = TargetFingerprint.of(self.target)
        self.dataset, self.validation = self.inputs.dataset, self.inputs.validation
        self.stream = BatchStream(
            self.dataset,
            data.batch_tokens,
            data.length_multiple,
            run.seed,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        begin("making the head")
        built = self.inputs.build_head()
        self.drafter, self.warm_start = built.drafter, built.warm_start
        self.correction, self._is_fit = built.correction, built.is_frozen
        self._ends_are_targets = config.head.freezes_ends and has_target_ends(
            self.drafter, self.target
        )
        if config.correction.on is not None:
            self._corrected_head = head_identity(config.correction.on, self.drafter.config)
        self.vocabulary = vocabulary_report(self.drafter, self.dataset, self.validation)
        precision = resolve_dtype(run.precision, self.device)
        self.trained = built.trained
        quantization = config.head.layer_quantization
        self._rounding = None
        if quantization is not None and not self._is_fit:
            self._rounding = Rounding(self.drafter.config, quantization)
        self.masters = build_masters(self.trained, precision, processes, self._rounding)
        if self._is_fit:
            self.drafter.to(precision)
        self.optimizers = build_optimizers(self.masters.named(), config.optimizer)
        self.memory = self._choose_memory(budget)
        self._step = self._build_step(self.memory.segments, self.memory.recompute, processes)
        self.step = 0
        self.num_tokens = 0
        self.seconds = self._before = 0.0
        self._start_step, self._started = 0, clock()
        self._origin: dict[str, Any] = {}
        self._head_sha256: str | None = None
        self._correction_sha256: str | None = None
        self.stop_requested = self._has_warned = False
        self.selection = Selection(run, config.method.depth)

    def run(self, *, resume: bool = False, is_locked: bool = False) -> dict[str, Any]:
        """Train to the end and write head, checkpoint and records; returns the record.

        With `resume` the run continues from the checkpoint in the output folder. It may have
        another number of steps: its learning rate then follows the schedule of this number from
        the start.

        The head that is kept is the best one by `selection`, or without validation data the newest.
        The run ends early where it expects no better one (`run.patience`). Once `stop_requested` is
        set, the trainer finishes and saves the step at hand.

        No other process may write the output folder meanwhile; with `is_locked` the caller sees to
        that (`peagle.disk.locked`).

        Raises:
            UserError: another process has the output folder; no checkpoint to resume from, or one
                beyond the last step; one that would be overwritten; an output that cannot be
                written; no space; a loss that is not finite.
            TrainingStopped: a stop was requested before the last step.
        """
        output = require_writable_folder(self.config.output, "The output folder")
        with ExitStack() as held:
            if not is_locked:
                self.processes.first(lambda: held.enter_context(locked(output)))
            return self._run(resume)

    def _run(self, resume: bool) -> dict[str, Any]:
        checkpoint = self.config.output / "checkpoint"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.processes.first(lambda: recover_state(checkpoint))
        if resume:
            self._begin("reading the checkpoint")
            self.step, progress = load_state(
                checkpoint, self.masters, self.optimizers, self._facts(), self.processes
            )
            require_steps_left(checkpoint, self.step, self.config.optimizer.steps)
            # Checkpoints of older versions lack these.
            self.seconds = progress.get("seconds", 0.0)
            self.num_tokens = progress.get("tokens", 0)
            self.selection.restore(progress.get("selection", {}))
            self._head_sha256 = progress.get("head_sha256")
            self._correction_sha256 = progress.get("correction_sha256")
        else:
            refuse_earlier_run(checkpoint)
        self.processes.first(lambda: self._require_room(resume))
        self._plan_steps()
        config, run, steps = self.config, self.config.run, self.config.optimizer.planned_steps
        if not resume:
            self._warn_of_epochs()
        self._origin = self._provenance()
        self.history.begin(self.step)
        self._start_step, self._started = self.step, self._clock()
        self._before = self.seconds
        if resume:
            self._restore_head()
        window = Window(config.method.depth, self.device)
        _, compiled = kernels_of(config, self.device)
        self._begin(f"step {self.step + 1} of {steps}" + (", compiling" if compiled else ""))
        stop = self.step if self.selection.exhausted else steps
        if self._is_fit and self.step == 0:
            self._select()
        source = self.inputs.source(self._batch_at)
        for batch, states in source.range(self.step, stop):
            outcome, norm = self._train_step(batch, states, self._learning_rate(self.step))
            window.add(outcome, batch, norm)
            self.step += 1
            self._stepped(self.step)
            if self._due(run.log_every):
                self._publish(self._reported("train", window))
                window = Window(config.method.depth, self.device)
            if self._due(run.validate_every):
                require_finite(window, self.step, config)
                self._select()
            stopping, ended = self._agree(batch), self.selection.exhausted
            if self._due(run.save_every) or stopping or ended:
                require_finite(window, self.step, config)
                self._save(checkpoint)
            if ended:
                break
            if stopping and self.step < steps:
                raise TrainingStopped(self.step, steps)
        return self._write_record()

    def validate(self) -> TrainingReport | None:
        """Measure loss and simulated acceptance on every element of the validation data.

        Raises:
            UserError: the loss is not finite.
        """
        if self.validation is None:
            return None
        config, data, run = self.config, self.config.data, self.config.run
        stream = ValidationStream(
            self.validation, data.batch_tokens, data.length_multiple, run.validation_batches
        )
        window = ValidationWindow(config.method.depth, self.device, run.validation_temperature)
        own = range(self.processes.rank, len(stream), self.processes.world_size)
        source = self.inputs.source(lambda index: stream.at(own[index]), "validation")
        for batch, states in source.range(0, len(own)):
            window.add(self._step.evaluate(batch, states), batch)
        return self._reported("validation", window)

    def measure_memory(self) -> PeakMemory:
        """Measure the memory of a step as this run takes it, on its GPU."""
        if not self.memory.parts:
            return self.memory
        segments, recompute = self.memory.segments, self.memory.recompute
        with self._probe() as probe:
            peak = probe.peak(segments, recompute)
        return self.memory if peak is None else PeakMemory(segments, recompute, peak, {})

    def measure_step(self, most_seconds: float = inf) -> float:
        """Return the mean seconds of a step, of a few after the steps that compile.

        Weights and optimizers stay as they are before the first step. Of all processes the slowest
        counts.

        Args:
            most_seconds: begin no further step after so long, once one is measured.
        """
        compiling = _COMPILING_STEPS if kernels_of(self.config, self.device)[1] else 1
        ends, most = [self._clock()], compiling + _MEASURED_STEPS
        for batch, states in self.inputs.source(self._batch_at).range(0, most):
            self._train_step(batch, states, rate=0.0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            ends.append(self._clock())
            is_long = len(ends) > compiling + 1 and ends[-1] - ends[0] > most_seconds
            if self.processes.most(int(is_long)):
                break
        for optimizer in self.optimizers:
            optimizer.state.clear()
        microseconds = 1e6 * (ends[-1] - ends[compiling]) / (len(ends) - 1 - compiling)
        return self.processes.most(ceil(microseconds)) / 1e6

    def _plan_steps(self) -> None:
        """Fix the number of steps of a run that `run.minutes` plans."""
        run = self.config.run
        if self.config.optimizer.steps is None and run.minutes is not None:
            self._begin("measuring a step")
            seconds = self.measure_step(60 * run.minutes * _MEASURED_SHARE)
            self.config = self.config.planned(run.steps_within(seconds))

    def _warn_of_epochs(self) -> None:
        stream, steps = self.stream, self.config.optimizer.planned_steps
        problem = epochs_warning(steps, stream.steps_per_epoch, len(self.dataset.tokens))
        if problem and not self._is_fit and self.processes.is_first:
            warnings.warn(problem, stacklevel=2)

    def _warn_of_overfitting(self) -> None:
        """Warn once of a validation that gets worse while training goes on getting better."""
        problem = "" if self._has_warned else rising_validation(self.history.every())
        if problem and self.processes.is_first:
            self._has_warned = True
            warnings.warn(problem, stacklevel=2)

    def _require_room(self, resume: bool) -> None:
        if not self._is_fit:
            sizes = (self._shape.checkpoint_bytes, self._shape.head_bytes)
            require_room(self.config.output, *sizes, resume=resume)

    def _choose_memory(self, budget: Budget) -> PeakMemory:
        """Choose segments and recomputation, where the configuration leaves them open."""
        config, device, world_size = self.config, self.device, self.processes.world_size
        target, batch = TargetShape.read(config.target), BatchShape.of(self.stream)
        shape = TrainingShape(config, self.drafter.config, target, batch, device, world_size)
        self._shape = shape
        progress = read_record(config.output / "checkpoint").get("progress", {})
        stored = progress.get("step_memory")
        choose = partial(
            choose_memory,
            shape,
            config.run,
            budget,
            stored=None if stored is None else (stored["segments"], stored["recompute_layers"]),
            processes=self.processes,
        )
        is_fixed = len(list(step_ways(config.run, config.method.name))) == 1
        if device.type != "cuda" or (is_fixed and not budget.is_given):
            return choose()
        self._begin("measuring the memory of a step")
        with self._probe() as probe:
            return choose(measure=probe.peak)

    def _probe(self) -> MemoryProbe:
        return MemoryProbe(
            self.masters,
            self.optimizers,
            self.inputs,
            self.stream.largest(),
            partial(self._build_step, processes=ONE_PROCESS),
        )

    def _build_step(self, segments: int, recompute: bool, processes: Processes) -> TrainingStep:
        """Build the step that computes gradients, by the settings of the run section."""
        run, section = self.config.run, self.config.method
        flex, compiled = kernels_of(self.config, self.device)
        attention = flex_attention if flex else dense_attention
        method = TrainingMethod(
            section, attention, flex=flex, recompute=recompute, compiled=compiled
        )
        objective = partial(Objective, self.drafter, self.target, section, run.loss_chunk_rows)
        own, alone, shares = self.config.correction, None, {}
        if self.correction is not None and not self._is_fit:
            alone = objective()
            shares = {"alone": own.alone, "own_drafts": own.own_drafts}
        training = objective(whole_vocabulary=False, correction=self.correction, **shares)
        validation = objective(temperature=run.validation_temperature, correction=self.correction)
        return TrainingStep(
            self.drafter,
            method,
            training,
            validation,
            segments,
            processes,
            alone=alone,
            is_frozen=self._is_fit,
        )

    def _agree(self, batch: Batch) -> bool:
        """Return whether a process asks to stop; add the tokens of all processes."""
        stops, num_tokens = self.processes.sum(
            torch.tensor([int(self.stop_requested), batch.num_tokens])
        ).tolist()
        self.num_tokens += num_tokens
        return stops > 0

    def _due(self, every: int) -> bool:
        """Return whether a periodic task, which also follows the last step, is due now."""
        return self.step % every == 0 or self.step == self.config.optimizer.planned_steps

    def _select(self) -> None:
        """Validate, and keep the head if it is the best so far.

        Before its first step a fresh correction changes nothing: the figures are the head's own, or
        those with the correction that it has, which a correction that is kept must beat.
        """
        if self.validation is not None:
            self._begin(f"validating step {self.step}")
        if (report := self.validate()) is not None:
            if self.selection.consider(report):
                report = replace(report, is_best=True)
                if self.step:
                    self._save_head()
            self._publish(report)
            self._warn_of_overfitting()

    def _train_step(
        self, batch: Batch, states: TargetStates, rate: float
    ) -> tuple[GradedElements, Tensor]:
        """Take one optimizer step; return the norm of its gradients too, before clipping."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        outcome = self._step.backward(batch, states, self._sampling(self.step))
        moved = self.masters.collect()
        norm = self.masters.clip(moved, self.config.optimizer.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.masters.publish()
        return outcome, norm

    def _save(self, checkpoint: Path) -> None:
        self._begin(f"saving step {self.step}")
        if self.selection.best is None:
            self._save_head()
        self.history.sync()
        self.seconds = self._before + self._clock() - self._started
        progress = {
            "head_sha256": self._head_sha256,
            "correction_sha256": self._correction_sha256,
            "seconds": self.seconds,
            "tokens": self.num_tokens,
            "selection": self.selection.to_json(),
            "step_memory": {
                "segments": self.memory.segments,
                "recompute_layers": self.memory.recompute,
            },
        }
        save_state(
            checkpoint,
            self.masters,
            self.optimizers,
            self.step,
            self._facts(),
            progress,
            self.processes,
        )

    @property
    def _written(self) -> dict[Path, str | None]:
        """Return the SHA-256 of each file that the run writes of what it trains; None: not yet."""
        found = {}
        if not self._is_fit:
            found[WEIGHTS_NAME] = self._head_sha256
        if self.correction is not None:
            # A checkpoint of a fit has the digest of its only file.
            digest = self._head_sha256 if self._is_fit else self._correction_sha256
            found[CORRECTION_NAME] = digest
        return {self.config.head_folder / name: digest for name, digest in found.items()}

    def _save_head(self) -> None:
        folder, dtype = self.config.head_folder, getattr(torch, self.config.run.save_dtype)
        longest, record = self.dataset.longest, self._record()
        if self.warm_start is not None:
            longest = max(longest, self.warm_start.trained_length or 0)

        def save() -> None:
            if not self._is_fit:
                save_drafter(
                    folder,
                    self.drafter,
                    fingerprint=self._fingerprint,
                    extra={LENGTH_KEY: longest},
                    dtype=dtype,
                    ends_are_targets=self._ends_are_targets,
                    rounding=self._rounding,
                )
                write_json(folder / RECORD_NAME, record)
                self._head_sha256 = sha256_of(folder / WEIGHTS_NAME)
            if self.correction is None:
                return
            is_fit, config = self._is_fit, self.drafter.config
            head = self._corrected_head if is_fit else head_identity(folder, config)
            facts = {name: record[name] for name in _CORRECTION_FACTS}
            save_correction(folder, self.correction, head, dtype=dtype, record=facts)
            self._correction_sha256 = sha256_of(folder / CORRECTION_NAME)
            if is_fit:
                self._head_sha256 = self._correction_sha256

        self.processes.first(save)

    def _restore_head(self) -> None:
        """Write the head again if its file is not the one that belongs to the checkpoint.

        A crash between the two leaves the head of a later step; the file may be damaged or gone.
        """
        others = [
            file
            for file, digest in self._written.items()
            if digest is not None and (not file.is_file() or sha256_of(file) != digest)
        ]
        if not self.processes.most(len(others) if self.processes.is_first else 0):
            return
        best = self.selection.best
        if best is None or best["step"] == self.step:
            self._save_head()
        elif self.processes.is_first:
            warnings.warn(
                f"{str(others[0])!r} is not what the checkpoint knows as the best, that of step "
                f"{best['step']}: it is of a later step, damaged or gone. The next one that is "
                "better replaces it.",
                stacklevel=2,
            )

    def _batch_at(self, step: int) -> Batch:
        """Return a batch of training, its elements drawn."""
        batch = self.stream.at(step)
        return replace(batch, layout=self._step.lay_out(batch, self._sampling(step)))

    def _sampling(self, step: int) -> torch.Generator:
        """Return the random numbers of a step's elements."""
        return torch.Generator().manual_seed(self.config.run.seed * _COD_SEED + step)

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then linear decay to zero at the last step."""
        options, steps = self.config.optimizer, self.config.optimizer.planned_steps
        warmup = max(1, round(steps * options.warmup_ratio))
        share = min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        return options.learning_rate * min(1.0, share)

    def _reported(self, kind: str, window: Window) -> TrainingReport:
        """Return the figures of a window, of all processes.

        Raises:
            UserError: one of them is not finite.
        """
        window.pool(self.processes)
        require_finite(window, self.step, self.config)
        steps = self.config.optimizer.planned_steps
        pace = (self._clock() - self._started) / max(1, self.step - self._start_step)
        return TrainingReport(
            kind=kind,
            step=self.step,
            steps=steps,
            learning_rate=self._learning_rate(min(self.step, steps - 1)),
            tokens_per_step=self.stream.tokens_per_step,
            seconds_left=pace * (steps - self.step),
            **window.figures(),
        )

    def _publish(self, report: TrainingReport) -> None:
        self.history.add(report)
        if self.processes.is_first:
            self.report(report)

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a resumed run must share with its checkpoint."""
        facts = config_facts(self.config)
        return facts | {
            **self._correction_facts(),
            "sequences": len(self.dataset),
            "warm_start": self.warm_start.sha256 if self.warm_start else None,
            "data": {**self.inputs.identity(), **facts["data"]},
            "target": {n: v for n, v in self._fingerprint.to_json().items() if n != "name"},
        }

    def _correction_facts(self) -> dict[str, Any]:
        """Return a fitted correction's shape and its head; {} where a head is trained."""
        if not self._is_fit:
            return {}
        shape = config_facts(self.config)["correction"]
        return {"correction": shape | {"head": self._corrected_head}}

    def _provenance(self) -> dict[str, Any]:
        """Return the origin of the run, read before it starts: files may change during it."""
        config, data = self.config, self.inputs.data_facts
        paths = {"target": True, "output": True, "data": {"train", "validation"}}
        if self._is_fit or self.correction is None:
            paths["correction"] = True
        return self._correction_facts() | {
            **environment(self.device),
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "config": config.model_dump(mode="json", exclude=paths),
            "target": self._fingerprint.to_json(),
            "warm_start": self.warm_start.to_json() if self.warm_start else None,
            "data": data,
            "data_sha256": self.inputs.identity()["train"],
        }

    def _record(self) -> dict[str, Any]:
        """Return the content of train.json: origin, progress and quality of the head."""
        planned, reason = self.config.optimizer.planned_steps, None
        if self.step == planned:
            reason = "steps"
        elif self.selection.exhausted:
            reason = "patience"
        self.seconds = self._before + self._clock() - self._started
        return {
            **self._origin,
            **self._counts(),
            "steps": self.step,
            "planned_steps": planned,
            "epochs": self.step / self.stream.steps_per_epoch,
            "sequences": len(self.dataset),
            "draft_vocabulary": self.vocabulary.to_json() if self.vocabulary else None,
            "tokens_per_step": self.stream.tokens_per_step,
            "segments": self.memory.segments,
            "recompute_layers": self.memory.recompute,
            "planned_memory_bytes": self.memory.total,
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "stop_reason": reason,  # none while other steps are to follow
            "final": self.history.last(),
            "validation": self.history.last("validation"),
            "best": self.selection.best,
        }

    def _counts(self) -> dict[str, int]:
        """Return the numbers in the parameters of what is trained; a correction's by themselves."""
        trained = self.correction if self._is_fit else self.drafter
        assert trained is not None
        counts = {"parameters": sum(p.numel() for p in trained.parameters())}
        if self.correction is not None and not self._is_fit:
            counts["correction_parameters"] = sum(p.numel() for p in self.correction.parameters())
        return counts

    def _write_record(self) -> dict[str, Any]:
        """Write the record of the run, beside the head and with it."""
        record = self._record()
        if self.processes.is_first:
            write_json(self.config.output / RECORD_NAME, record)
            if not self._is_fit and self.config.head_folder.is_dir():
                write_json(self.config.head_folder / RECORD_NAME, record)
        return record
