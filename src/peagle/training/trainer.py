"""The training loop: one optimizer step after another, validated, saved, exactly resumable."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.errors import UserError
from peagle.models.checkpoint import save_drafter, write_json
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel, load_tokenizer
from peagle.training.batches import Batch, BatchStream, ValidationStream
from peagle.training.build import build_drafter
from peagle.training.config import TrainConfig
from peagle.training.data import ResponseDataset
from peagle.training.element_attention import dense_attention, flex_attention
from peagle.training.features import TargetStates, target_states
from peagle.training.masters import Masters
from peagle.training.methods import Method
from peagle.training.objective import Objective
from peagle.training.optimizers import build_optimizers
from peagle.training.provenance import provenance
from peagle.training.reporting import History, Report, Window
from peagle.training.source import Source
from peagle.training.state import load_state, save_state
from peagle.training.step import Outcome, Step
from peagle.training.vocabulary import vocabulary_report

_COD_SEED = 7_919


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
        self.masters = Masters(self.drafter, resolve_dtype(run.precision, self.device))
        self.optimizers = build_optimizers(self.masters.named(), config.optimizer)
        self._step = _build_step(config, self.drafter, self.target, self.device)
        self.step = 0
        self.stop_requested = False
        self.history = History(config.output)

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
            self.step = load_state(checkpoint, self.masters, self.optimizers, self._facts())
        elif checkpoint.exists():
            raise UserError(
                f"{str(checkpoint)!r} holds an earlier run; go on with --resume or choose another "
                "output."
            )
        steps, run = config.optimizer.steps, config.run
        start_step, started = self.step, time.perf_counter()
        window = Window(self._step.method.section.depth, self.device)
        compute = partial(target_states, self.target)
        source = Source(self.stream.at, self.device, compute=compute)
        for batch, states in source.range(self.step, steps):
            window.add(self._train_step(batch, states), batch.num_tokens)
            self.step += 1
            if self.step % run.log_every == 0 or self.step == steps:
                pace = (time.perf_counter() - started) / (self.step - start_step)
                self._log("train", window, pace)
                window = Window(self._step.method.section.depth, self.device)
            if self.step % run.validate_every == 0 or self.step == steps:
                self.validate()
            if self.step % run.save_every == 0 or self.step == steps or self.stop_requested:
                self._save(checkpoint)
            if self.stop_requested and self.step < steps:
                raise TrainingStopped(self.step, steps)
        return self._finish(time.perf_counter() - started)

    def validate(self) -> Report | None:
        """Loss and simulated acceptance on the validation data, every element of it."""
        if self.validation is None:
            return None
        data, run = self.config.data, self.config.run
        stream = ValidationStream(
            self.validation, data.batch_tokens, data.length_multiple, run.validation_batches
        )
        window = Window(self._step.method.section.depth, self.device, walk=True)
        source = Source(stream.at, self.device, compute=partial(target_states, self.target))
        for batch, states in source.range(0, len(stream)):
            window.add(self._step.evaluate(batch, states), batch.num_tokens)
        return self._log("validation", window, 0.0)

    def _train_step(self, batch: Batch, states: TargetStates) -> Outcome:
        """One optimizer step."""
        rate = self._learning_rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        generator = torch.Generator(self.device)
        generator.manual_seed(self.config.run.seed * _COD_SEED + self.step)
        outcome = self._step.backward(batch, states, generator)
        moved = self.masters.collect()
        torch.nn.utils.clip_grad_norm_(moved, self.config.optimizer.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.masters.publish()
        return outcome

    def _save(self, checkpoint: Path) -> None:
        save_state(checkpoint, self.masters, self.optimizers, self.step, self._facts())
        run = self.config.run
        save_head(self.drafter, self.target, self.config.output / "head", run.save_dtype)

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero at the last step."""
        options = self.config.optimizer
        warmup = max(1, round(options.steps * options.warmup_ratio))
        share = min((step + 1) / warmup, (options.steps - step) / max(1, options.steps - warmup))
        return options.learning_rate * min(1.0, share)

    def _log(self, kind: str, window: Window, pace: float) -> Report:
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
        self.history.add(report)
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
            "final": self.history.last(),
            "validation": self.history.last("validation"),
        }
        write_json(config.output / "train.json", record)
        return record


def _build_step(
    config: TrainConfig, drafter: Drafter, target: TargetModel, device: torch.device
) -> Step:
    """What computes gradients, as the run section says."""
    run, section = config.run, config.method
    on_gpu = device.type == "cuda"
    # EAGLE-3 has a shape for every depth, each to be compiled: a mask is cheaper there.
    suits = on_gpu and section.name == "peagle"
    flex = run.attention == "flex" or (run.attention == "auto" and suits)
    method = Method(
        section,
        flex_attention if flex else dense_attention,
        flex=flex,
        recompute=run.recompute_layers,
        compiled=suits,
    )
    training, validation = (
        Objective(drafter, target, section, run.loss_chunk_rows, whole_vocabulary=whole)
        for whole in (False, True)
    )
    return Step(drafter, method, training, validation, run.segments or 1)


def save_head(drafter: Drafter, target: TargetModel, folder: Path, dtype: str) -> None:
    """Write the head as it stands, vLLM style, with the target's fingerprint."""
    save_drafter(
        folder,
        drafter,
        fingerprint=TargetFingerprint.of(target),
        dtype=getattr(torch, dtype),
    )
