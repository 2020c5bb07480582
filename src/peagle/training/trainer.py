"""The training loop: one optimizer step after another, validated, saved, exactly resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.errors import UserError
from peagle.models.checkpoint import save_drafter, write_json
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel, load_tokenizer
from peagle.training.build import build_drafter
from peagle.training.config import TrainConfig
from peagle.training.data import Batch, BatchStream, ResponseDataset
from peagle.training.element_attention import dense_attention, flex_attention
from peagle.training.features import TargetStates, target_states
from peagle.training.losses import AcceptanceMeter
from peagle.training.methods import Graded, Method
from peagle.training.objective import Grade, Objective
from peagle.training.optimizers import build_optimizers
from peagle.training.partition import partitioned_graded, two_pass_backward
from peagle.training.provenance import provenance
from peagle.training.state import load_state, save_state
from peagle.training.vocabulary import vocabulary_report

_COD_SEED = 7_919

# Row, anchor, depth and greedy match of graded elements, all [M].
_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Report:
    """What the trainer says while it runs.

    Attributes:
        kind: "train", "validation" or "end".
        step, steps: how far.
        loss: mean over graded elements.
        accuracy: per depth, P(draft matches).
        acceptance: per depth, P(all drafts down to it match).
        acceptance_lengths: simulated, greedy, at K = 1, 2, ... up to the depth of the method; over
            all anchors in training, as serving would walk them in validation.
        learning_rate, tokens_per_s, seconds_left: of the run; tokens_per_step: mean of the data.
    """

    kind: str
    step: int
    steps: int
    loss: float
    accuracy: list[float]
    acceptance: list[float]
    acceptance_lengths: list[float]
    learning_rate: float
    tokens_per_s: float
    tokens_per_step: float
    seconds_left: float


class TrainingStopped(Exception):
    """A requested stop: the checkpoint holds the step that was reached."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped at step {step} of {steps}; go on with --resume")


class Trainer:
    """Trains one head.

    The loss has one denominator for the whole batch; all randomness is a function of (seed, step),
    so a resumed run takes the very steps that an uninterrupted one would have taken.

    Args:
        config: the run.
        report: receives progress.

    Raises:
        UserError: target, data or configuration are not usable.
    """

    def __init__(
        self, config: TrainConfig, report: Callable[[Report], None] = lambda _: None
    ) -> None:
        self.config = config
        self.report = report
        run = config.run
        self.device = resolve_device(run.device)
        if self.device.type == "cuda":
            # The frozen target in float32: TF32 products are twice as exact as bfloat16 ones.
            torch.set_float32_matmul_precision("high")
        self.target = TargetModel.load(
            config.target, dtype=resolve_dtype(run.target_dtype, self.device), device=self.device
        )
        tokenizer = load_tokenizer(config.target)
        data = config.data
        load = (tokenizer, self.target.vocab_size, data.max_length)
        self.dataset = ResponseDataset.load(data.train, *load)
        self.stream = BatchStream(self.dataset, data.batch_tokens, data.length_multiple, run.seed)
        self.validation = ResponseDataset.load(data.validation, *load) if data.validation else None
        self.drafter = build_drafter(config, self.target, tokenizer, self.dataset)
        self.vocabulary = vocabulary_report(self.drafter, self.dataset, self.validation)
        self.target.tap_aux(self.drafter.config.aux_layer_ids)
        # EAGLE-3 has a shape for every depth, each to be compiled: a mask is cheaper there.
        suits_flex = self.device.type == "cuda" and config.method.name == "peagle"
        flex = run.attention == "flex" or (run.attention == "auto" and suits_flex)
        self.method = Method(
            config.method,
            flex_attention if flex else dense_attention,
            flex=flex,
            recompute=run.recompute_layers,
        )
        self.objective = Objective(self.drafter, self.target, config.method, run.loss_chunk_rows)
        self.optimizers = build_optimizers(self.drafter, config.optimizer)
        self.step = 0
        self.stop_requested = False
        self.history: list[dict[str, Any]] = []

    def run(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the end and write head, checkpoint and records; returns the record.

        Once `stop_requested` is set, the step at hand is finished and saved, and
        `TrainingStopped` says where to go on.

        Args:
            resume: go on from the checkpoint in the output folder.

        Raises:
            UserError: no checkpoint to resume from, one that would be overwritten, or no space.
            TrainingStopped: a stop was requested before the last step.
        """
        config, output = self.config, self.config.output
        checkpoint = output / "checkpoint"
        output.mkdir(parents=True, exist_ok=True)
        if resume:
            self.step = load_state(checkpoint, self.drafter, self.optimizers, self._facts())
        elif checkpoint.exists():
            raise UserError(
                f"{str(checkpoint)!r} holds an earlier run; go on with --resume or choose another "
                "output."
            )
        steps, run = config.optimizer.steps, config.run
        start_step, started = self.step, time.perf_counter()
        window = _Window(self.method.section.depth, self.device)
        while self.step < steps:
            batch = self.stream.at(self.step)
            loss = self._train_step(batch.to(self.device), window.meter)
            window.add(loss, int(batch.lengths_B.sum()))
            self.step += 1
            if self.step % run.log_every == 0 or self.step == steps:
                pace = (time.perf_counter() - started) / (self.step - start_step)
                self._log("train", window, pace)
                window = _Window(self.method.section.depth, self.device)
            if self.step % run.validate_every == 0 or self.step == steps:
                self.validate()
            if self.step % run.save_every == 0 or self.step == steps or self.stop_requested:
                save_state(checkpoint, self.drafter, self.optimizers, self.step, self._facts())
                save_head(self.drafter, self.target, output / "head", run.save_dtype)
            if self.stop_requested and self.step < steps:
                raise TrainingStopped(self.step, steps)
        return self._finish(time.perf_counter() - started)

    def validate(self) -> Report | None:
        """Loss and simulated acceptance on the validation data, every element of it."""
        if self.validation is None:
            return None
        data = self.config.data
        stream = BatchStream(self.validation, data.batch_tokens, data.length_multiple, seed=0)
        window = _Window(self.method.section.depth, self.device, walk=True)
        with torch.no_grad():
            for index in range(min(self.config.run.validation_batches, stream.steps_per_epoch)):
                batch = stream.at(index)
                on_device = batch.to(self.device)
                loss, weight = self._loss(on_device, window.meter, None, everything=True)
                window.add(loss / weight, int(batch.lengths_B.sum()))
        return self._log("validation", window, 0.0)

    def _train_step(self, batch: Batch, meter: AcceptanceMeter) -> torch.Tensor:
        options = self.config.optimizer
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate(self.step)
        generator = torch.Generator(self.device)
        generator.manual_seed(self.config.run.seed * _COD_SEED + self.step)
        self.drafter.zero_grad(set_to_none=True)
        if self.config.run.segments is None:
            loss, weight = self._loss(batch, meter, generator, everything=False)
            mean = loss / weight
            mean.backward()
        else:
            mean = self._partitioned(batch, meter, generator, self.config.run.segments)
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), options.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return mean.detach()

    def _loss(
        self,
        batch: Batch,
        meter: AcceptanceMeter,
        generator: torch.Generator | None,
        *,
        everything: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sum of the element losses, and the sum of the weights."""
        states = target_states(self.target, batch)
        loss = torch.zeros((), device=self.device)
        weight = torch.zeros((), device=self.device)
        parts: list[_Part] = []
        with self._autocast():
            for graded in self._graded(batch, states, generator, everything=everything):
                grade = self.objective.grade(graded, states)
                loss = loss + grade.loss
                weight = weight + grade.weight
                parts.append(_part(graded, grade))
        _add_all(meter, parts)
        return loss, weight.clamp_min(1)

    def _graded(
        self,
        batch: Batch,
        states: TargetStates,
        generator: torch.Generator | None,
        *,
        everything: bool,
    ) -> Iterator[Graded]:
        """Graded elements; what does not fit into one pass in training does not in validation."""
        segments, method, drafter = self.config.run.segments, self.method, self.drafter
        if segments is None:
            return iter([method.graded(drafter, batch, states, generator, everything=everything)])
        elements = method.elements(batch, generator, everything=everything)
        return partitioned_graded(drafter, batch, states, elements, segments, method)

    def _partitioned(
        self, batch: Batch, meter: AcceptanceMeter, generator: torch.Generator, segments: int
    ) -> torch.Tensor:
        """Mean of the element losses; gradients are added up segment by segment."""
        states = target_states(self.target, batch)
        elements = self.method.elements(batch, generator)
        # One denominator for all segments, known before the first.
        depths = elements.depths[elements.supervised]
        weight = self.objective.weights(depths).sum().clamp_min(1)
        parts: list[_Part] = []

        def loss_of(graded: Graded) -> torch.Tensor:
            grade = self.objective.grade(graded, states)
            parts.append(_part(graded, grade))
            return grade.loss / weight

        mean = two_pass_backward(
            self.drafter,
            batch,
            states,
            elements,
            segments,
            loss_of,
            method=self.method,
            autocast=self._autocast,
        )
        _add_all(meter, parts)
        return mean

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero at the last step."""
        options = self.config.optimizer
        warmup = max(1, round(options.steps * options.warmup_ratio))
        share = min((step + 1) / warmup, (options.steps - step) / max(1, options.steps - warmup))
        return options.learning_rate * min(1.0, share)

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self.config.run.precision
        if precision == "bfloat16" or (precision == "auto" and self.device.type == "cuda"):
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _log(self, kind: str, window: _Window, pace: float) -> Report:
        steps = self.config.optimizer.steps
        report = Report(
            kind=kind,
            step=self.step,
            steps=steps,
            loss=window.loss(),
            accuracy=window.meter.accuracy(),
            acceptance=window.meter.unconditional(),
            acceptance_lengths=window.acceptance_lengths(),
            learning_rate=self._learning_rate(min(self.step, steps - 1)),
            tokens_per_s=window.tokens_per_s(),
            tokens_per_step=self.stream.tokens_per_step,
            seconds_left=pace * (steps - self.step),
        )
        self.history.append(asdict(report))
        with (self.config.output / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(report)) + "\n")
        self.report(report)
        return report

    def _facts(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on."""
        config = self.config
        return {
            "method": config.method.facts(),
            "head": config.head.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "seed": config.run.seed,
            "sequences": len(self.dataset),
            "batch_tokens": config.data.batch_tokens,
        }

    def _finish(self, seconds: float) -> dict[str, Any]:
        config = self.config
        validations = [entry for entry in self.history if entry["kind"] == "validation"]
        record = {
            **provenance(config.data.train, self.device),
            "config": config.model_dump(mode="json", exclude={"target", "output", "data"}),
            "parameters": sum(p.numel() for p in self.drafter.parameters()),
            "steps": self.step,
            "epochs": self.step / self.stream.steps_per_epoch,
            "sequences": len(self.dataset),
            "draft_vocabulary": self.vocabulary.to_json() if self.vocabulary else None,
            "tokens_per_step": self.stream.tokens_per_step,
            "seconds": seconds,
            "final": self.history[-1] if self.history else None,
            "validation": validations[-1] if validations else None,
        }
        write_json(config.output / "train.json", record)
        return record


def save_head(drafter: Drafter, target: TargetModel, folder: Path, dtype: str) -> None:
    """Write the head as it stands, vLLM style, with the target's fingerprint."""
    save_drafter(
        folder,
        drafter,
        fingerprint=TargetFingerprint.of(target),
        dtype=getattr(torch, dtype),
    )


def _part(graded: Graded, grade: Grade) -> _Part:
    """What the meter needs, without the hidden states."""
    return graded.row, graded.anchor, graded.depth, grade.match_M


def _add_all(meter: AcceptanceMeter, parts: list[_Part]) -> None:
    """Pool all parts at once, since a chain is spread over them."""
    meter.add(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _Window:
    """Figures since the last report; nothing waits for the device before they are read."""

    def __init__(self, num_depths: int, device: torch.device, *, walk: bool = False) -> None:
        self.walk = walk
        self.meter = AcceptanceMeter(num_depths, device, walk=walk)
        self._losses: list[torch.Tensor] = []
        self._num_tokens = 0
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor, num_tokens: int) -> None:
        self._losses.append(loss)
        self._num_tokens += num_tokens

    def acceptance_lengths(self) -> list[float]:
        meter = self.meter
        at = meter.served_acceptance_length if self.walk else meter.acceptance_length
        return [at(k) for k in range(1, meter.num_depths + 1)]

    def loss(self) -> float:
        return float(torch.stack(self._losses).mean()) if self._losses else float("nan")

    def tokens_per_s(self) -> float:
        return self._num_tokens / (time.perf_counter() - self._started)
