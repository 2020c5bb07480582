"""Training a head further on recorded traffic: its correction alone, or the head too."""

import gc
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from peagle.data.prepare import Collected
from peagle.disk import LOCK_NAME
from peagle.errors import UserError
from peagle.models.checkpoint import copy_correction, read_correction, read_head
from peagle.models.drafter import DrafterConfig
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer

What = Literal["correction", "head"]
_MAX_EPOCHS = {"correction": 6, "head": 3}
_MUON_RATE = 3e-4  # of a head; higher rates forget more
_HEAD_SHARE = 0.6  # of the minutes, where a correction is fitted behind
_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
_ROW_MULTIPLE = 64
_NUM_VALIDATIONS = 6
_MEASURED_SHARE = 0.1  # of the minutes, at most, for the measurement of a step


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The training of a head on traffic, within some minutes or steps.

    Attributes:
        what: "correction" fits the correction of the frozen head, from the present one where it has
            one; "head" goes on training the head and then does the same.
        head, target: folders.
        minutes: of training steps, at most, and no more than a few epochs.
        steps: of each training, in place of minutes; runs with equal steps and seed are equal.
        overrides: of the training configuration, KEY=VALUE.
        with_correction: whether the head is served with a correction; else "head" fits none.
    """

    what: What
    head: Path
    target: Path
    device: torch.device
    seed: int
    minutes: float
    steps: int | None = None
    overrides: Sequence[str] = ()
    with_correction: bool = True

    def run(
        self,
        train: Collected,
        validation: Collected,
        facts: dict[str, Any],
        work: Path,
        begin: Callable[[str], None] = lambda _: None,
        stepped: Callable[[int, int], None] = lambda *_: None,
    ) -> tuple[Path, dict[str, int]]:
        """Train in an empty folder; return the new head there, and steps by what was trained.

        `validation` chooses the best step, `facts` are the provenance of the data. `begin` gets the
        name of what begins, `stepped` the number of a finished step and that of all.

        Raises:
            UserError: head, target or configuration are not usable.
        """
        self._free()
        longest = max(map(len, (*train.tokens, *validation.tokens)))
        configs = self.configs(work, longest)
        for name, collected in (("train", train), ("validation", validation)):
            collected.write(work / f"{name}.safetensors", facts)
        head, steps = work / "head", {}
        if self.what == "correction":
            head.mkdir()
            for file in self.head.iterdir():
                if file.is_file() and file.name != LOCK_NAME:
                    shutil.copyfile(file, head / file.name)  # not its mode: it may be read-only
        head_share = 1.0 if len(configs) == 1 else _HEAD_SHARE
        for what, config in configs.items():
            if what != self.what and config.correction.start == "present":
                copy_correction(self.head, head, read_head(head).config)
            share = head_share if what == self.what else 1 - head_share
            steps[what] = self._train(what, config, self.minutes * share, begin, stepped)
        return head, steps

    def configs(self, work: Path, longest: int) -> dict[What, TrainConfig]:
        """Return the configuration of each training in a folder, in their order.

        Where the head is not there yet, this takes the greatest depth and no present correction.

        Args:
            longest: most tokens of a sample, or more.

        Raises:
            UserError: the head or one of `overrides` is not usable.
        """
        config = read_head(self.head).config if self.head.exists() else None
        is_parallel = config is None or config.is_parallel
        data = {name: str(work / f"{name}.safetensors") for name in ("train", "validation")} | {
            "max_length": max(longest, 8),
            "batch_tokens": max(_BATCH_TOKENS.get(self.device.type, 8192), longest + _ROW_MULTIPLE),
            "length_multiple": _ROW_MULTIPLE,
        }
        base = {
            "target": str(self.target),
            "data": data,
            "method": {
                "name": "peagle" if is_parallel else "eagle3",
                "depth": 64 if config is None else config.trained_depth or 8,
            },
            "run": {
                "seed": self.seed,
                "device": str(self.device),
                "validation_temperature": 0.0,
                "validation_batches": 64,
                "save_every": 1 << 30,
            },
        }
        runs: dict[What, dict[str, Any]] = {}
        if self.what == "head":
            init, optimizer = {"init": str(self.head)}, {"name": "muon", "steps": 1}
            runs["head"] = {"output": str(work), "head": init, "optimizer": optimizer}
        sizes: dict[str, int] = {}
        if self.what == "correction" or (is_parallel and self.with_correction):
            sizes = _sizes(self.head, config)
            own = {"on": str(work / "head"), "start": "present", **sizes}
            runs["correction"] = {"output": str(work / "correction"), "correction": own}
        configs: dict[What, TrainConfig] = {
            what: TrainConfig.of(base | run, self.overrides, source=f"--what {self.what}")
            for what, run in runs.items()
        }
        if "head" in configs:
            configs["head"] = _with_low_rate(configs["head"])
        if "correction" in configs and configs["correction"].correction.start == "present":
            for name, found in sizes.items():
                if (asked := getattr(configs["correction"].correction, name)) != found:
                    raise UserError(
                        f"correction.{name} is {asked}, and the correction of {str(self.head)!r} "
                        f"has {found}; expected the same to go on with it. Leave correction.{name} "
                        "out, or add --set correction.start=fresh for a new one."
                    )
        return configs

    def _train(
        self,
        what: What,
        config: TrainConfig,
        minutes: float,
        begin: Callable[[str], None],
        stepped: Callable[[int, int], None],
    ) -> int:
        """Train by a configuration; return the number of steps."""
        total = 0
        trainer = Trainer(config, begin=begin, stepped=lambda step: stepped(step, total))
        total = self.steps or 0
        if not total:
            begin("measuring a step")
            seconds = trainer.measure_step(60 * minutes * _MEASURED_SHARE)
            most = _MAX_EPOCHS[what] * trainer.stream.steps_per_epoch
            if what == "correction":
                most = min(most, config.correction.steps)
            total = max(1, min(most, int(60 * minutes / max(seconds, 1e-6))))
        every = max(1, -(-total // _NUM_VALIDATIONS))
        run = config.run.model_copy(update={"validate_every": every})
        trainer.config = config.planned(total).model_copy(update={"run": run})
        trainer.run()
        del trainer
        self._free()
        return total

    def _free(self) -> None:
        """Give back the memory of what nothing names any more: engines have circles."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_adaptable(head: Path, what: What) -> DrafterConfig:
    """Return the shape of a head that can be adapted.

    Raises:
        UserError: it is an EAGLE-3 head, and a correction is asked for; or it is none.
    """
    config = read_head(head).config
    if what == "correction" and not config.is_parallel:
        raise UserError(
            f"{str(head)!r} is an EAGLE-3 head, whose drafts see each other and need no "
            "correction; expected a P-EAGLE head, or --what head."
        )
    return config


def _with_low_rate(config: TrainConfig) -> TrainConfig:
    """Return a run with Muon's rate for a trained head, unless another one was given."""
    given = config.optimizer
    if given.name != "muon" or "learning_rate" in given.model_fields_set:
        return config
    optimizer = given.model_copy(update={"learning_rate": _MUON_RATE})
    return config.model_copy(update={"optimizer": optimizer})


def _sizes(head: Path, config: DrafterConfig | None) -> dict[str, int]:
    """Return the sizes of the correction beside a head, {} without one."""
    present = None if config is None else read_correction(head, config)
    return {} if present is None else {"rank": present.rank, "width": present.width}
