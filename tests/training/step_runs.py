"""Real steps of random heads, and the bytes that they take."""

import dataclasses
import gc
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from peagle.data.batches import Batch, moved
from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target_facts import TargetShape
from peagle.training.build import Built, build_correction
from peagle.training.config import TrainConfig
from peagle.training.element_attention import dense_attention, flex_attention
from peagle.training.optimizers import Masters, build_optimizers
from peagle.training.step import Objective, TrainingStep
from peagle.training.step_memory import BatchShape, TrainingShape
from peagle.training.training_methods import TrainingMethod
from tests.training.reference import make_plain_batch

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 20,
    "vocab_size": 300,
    "draft_vocab_size": 300,
    "target_hidden_size": 48,
    "aux_layer_ids": (0, 1, 2),
    "mask_token_id": 1,
    "max_position_embeddings": 512,
}


@dataclass
class Case:
    """A step to measure.

    Attributes:
        segments, recompute: of the partition.
        head, method, run, optimizer: over the usual ones.
        rows, length: of the batch.
        packed: two documents a row.
        frozen: which ends of the head are not trained, "embeddings" and "lm_head".
        quantization: type that the linear layers are rounded to.
        correction: whether a correction is trained with the head.
    """

    segments: int = 1
    recompute: bool = False
    head: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    rows: int = 2
    length: int = 256
    packed: bool = False
    frozen: tuple[str, ...] = ()
    quantization: str | None = None
    correction: bool = False

    @property
    def config(self) -> TrainConfig:
        """The configuration of such a run; its paths lead nowhere."""
        return TrainConfig.model_validate(
            {
                "target": "none",
                "output": "none",
                "data": {
                    "train": "none",
                    "batch_tokens": self.rows * self.length,
                    "length_multiple": 8,
                },
                "head": {
                    **{f"freeze_{name}": True for name in self.frozen},
                    "quantization": self.quantization,
                },
                "method": {"depth": 6, **self.method},
                "optimizer": {"steps": 3, "name": self.optimizer},
                "correction": {"train": "together", "width": 48} if self.correction else {},
                "run": {"device": "cpu", **self.run},
            }
        )

    @property
    def drafter_config(self) -> DrafterConfig:
        mask = None if self.config.method.name == "eagle3" else 1
        return DrafterConfig(**{**SIZES, "mask_token_id": mask, **self.head})

    @property
    def shape(self) -> TrainingShape:
        """What the model is told."""
        return self.shape_on("cpu")

    def shape_on(self, device: str) -> TrainingShape:
        """The same on a device that need not be here."""
        head = self.drafter_config
        text = types.SimpleNamespace(
            hidden_size=head.target_hidden_size,
            vocab_size=head.vocab_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=16,
            intermediate_size=64,
        )
        target = TargetShape("none", text, 0, 0, 0)  # type: ignore[arg-type]
        length = self.length
        batch = BatchShape(self.rows, length, length, self.packed, length - 2, length / 2)
        return TrainingShape(self.config, head, target, batch, torch.device(device))


class Running:
    """The step of a case, with everything that it needs."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        gc.collect()  # else what the last case left in cycles goes away while this one is measured
        torch.manual_seed(0)
        config, head, shape = case.config, case.drafter_config, case.shape_on(device)
        self.device, wide = torch.device(device), shape.target_dtype
        self.drafter = Drafter(head).to(device)
        for name in config.head.frozen:
            self.drafter.get_parameter(name).requires_grad_(False)
        built = Built(self.drafter, None)
        if case.correction:
            correction = build_correction(head.hidden_size, config).to(device)
            correction.reset(0)
            built = dataclasses.replace(built, correction=correction)
        self.masters = Masters(built.trained, shape.dtype, shape.rounding)
        self.optimizers = build_optimizers(self.masters.named(), config.optimizer)
        weight = torch.randn(shape.graded_vocabulary, head.target_hidden_size).to(device, wide)
        target: Any = types.SimpleNamespace(
            compute_logits=lambda x: x @ weight.T,
            logits_of=lambda _: lambda x: x @ weight.T,
        )
        rows = config.run.loss_chunk_rows
        training, validation = (
            Objective(
                self.drafter,
                target,
                config.method,
                rows,
                whole_vocabulary=whole,
                correction=built.correction,
                alone=config.correction.alone,
            )
            for whole in (False, True)
        )
        flex, compiled = shape.kernels
        attention = flex_attention if flex else dense_attention
        ways = {"flex": flex, "compiled": compiled, "recompute": case.recompute}
        method = TrainingMethod(config.method, attention, **ways)
        self.step = TrainingStep(self.drafter, method, training, validation, case.segments)
        tokens = torch.randint(2, head.vocab_size, (case.rows, case.length))
        self.batch: Batch = make_plain_batch(tokens, torch.ones(case.rows, dtype=torch.int64))
        if case.packed:
            self.batch.documents_BN[:, case.length // 2 :] += 1
        features = torch.randn(case.rows, case.length, head.feature_size)
        hidden = torch.randn(case.rows, case.length, head.target_hidden_size)
        self.states = TargetStates(features.to(device, wide), hidden.to(device, wide))

    def run(self, seed: int) -> None:
        """One optimizer step."""
        self.backward(seed)
        self.masters.clip(self.masters.collect(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.masters.publish()

    def backward(self, seed: int) -> None:
        """Its gradients alone."""
        generator = torch.Generator().manual_seed(seed)
        layout = self.step.lay_out(self.batch, generator)
        batch = moved(dataclasses.replace(self.batch, layout=layout), self.device)
        self.step.backward(batch, self.states, generator)

    def _make_optimizer_states(self) -> None:
        """What an optimizer keeps from its first step on, without the passes of that step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def gpu_peak(self) -> int:
        """Bytes of everything on the GPU at the peak of a step, once all is compiled."""
        self.run(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        return torch.cuda.max_memory_allocated()

    def peak(self, *, optimize: bool = True) -> int:
        """Bytes of tensors at the peak of a step, above what stands before it."""
        self._make_optimizer_states()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.run(1) if optimize else self.backward(1)
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        events: Any = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        now = peak = 0
        for _, change in changes:
            now += change
            peak = max(peak, now)
        return peak
