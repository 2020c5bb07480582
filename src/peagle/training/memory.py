"""The peak memory of a training step, from shapes alone: no model is loaded, no step is run.

A step is a row of phases (the target's pass, the head's passes with their losses, the optimizer);
each is a sum of what stays and what comes and goes, and the peak is the largest sum. What shapes do
not tell is in `Calibration`. Tests compare with the bytes that real steps take.

Sizes: B rows, N positions of a row, T = B * N, E deeper elements of a segment's row, D and I widths
of the head and of its MLP, H target width, A aux states, V target and DV draft vocabulary; Q and KV
widths of all query heads and of all key heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peagle.engine.memory_plan import size_text
from peagle.training.kept import CALIBRATION, Calibration, KeptBytes
from peagle.training.source import AHEAD
from peagle.training.step_shape import StepShape

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step at its peak.

    Attributes:
        segments, recompute: S, and whether layers are computed again.
        phase: in which the peak is.
        parts: bytes by what takes them.
    """

    segments: int
    recompute: bool
    phase: str
    parts: Parts

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        layers = "recomputed" if self.recompute else "kept"
        return (
            f"memory: about {size_text(self.total)} at the peak ({self.phase}), "
            f"S = {self.segments}, layers {layers}"
        )


def step_memory(shape: StepShape, segments: int, recompute: bool) -> StepMemory:
    """The peak of a step: the largest of its phases."""
    return max(step_phases(shape, segments, recompute), key=lambda memory: memory.total)


def step_phases(
    shape: StepShape,
    segments: int,
    recompute: bool,
    calibration: Calibration = CALIBRATION,
) -> list[StepMemory]:
    """The phases of a step.

    Args:
        shape: what decides it.
        segments, recompute: as the partition would have them; EAGLE-3 has neither.
        calibration: what shapes do not tell.
    """
    model = _Phases(shape, segments, recompute, calibration)
    phases = model.eagle3() if shape.method.name == "eagle3" else model.peagle()
    phases |= model.around()
    stays = model.stays()
    return [
        StepMemory(segments, recompute, name, _joined(stays, parts, shape, calibration))
        for name, parts in phases.items()
    ]


def _joined(stays: Parts, comes: Parts, shape: StepShape, calibration: Calibration) -> Parts:
    """One phase: all that stays, less what a phase says is not there (below 0), and what comes."""
    parts = dict(stays)
    for name, size in comes.items():
        parts[name] = max(0, parts.get(name, 0) + size)
    if shape.device.type == "cuda":
        moving = sum(size for name, size in parts.items() if name not in stays)
        parts["fragments"] = int(moving * calibration.fragments)
    return {name: size for name, size in parts.items() if size}


class _Phases:
    """Bytes of every phase of a step."""

    def __init__(
        self, shape: StepShape, segments: int, recompute: bool, calibration: Calibration
    ) -> None:
        self.shape, self.segments, self.recompute = shape, segments, recompute
        self.calibration = calibration
        self.size = shape.dtype.itemsize
        self.kept = KeptBytes(shape, calibration)

    # ---- what stays ----

    def stays(self) -> Parts:
        """What is there in all phases."""
        shape, own = self.shape, self.shape.parameters
        angles = 2 * shape.num_positions * shape.head.head_dim * self.size
        on_gpu, share = shape.device.type == "cuda", shape.world_size
        return {
            "head": own.total * self.size + own.buffer_bytes,
            "float32 weights": own.trained * 4 // share if shape.has_masters else 0,
            "gradients": own.trained * 4,
            "optimizer": shape.optimizer_bytes // share,
            "target": self._target_bytes(),
            "features": self._feature_bytes(),
            "angles, workspaces": angles + (self.calibration.workspace if on_gpu else 0),
        }

    def _target_bytes(self) -> int:
        shape, target = self.shape, self.shape.target
        count = target.num_lm_head if shape.stored else target.num_parameters
        if shape.graded_vocabulary < shape.head.vocab_size:
            count += shape.graded_vocabulary * target.hidden_size  # rows of lm_head, copied
        return count * shape.target_dtype.itemsize

    def _feature_bytes(self) -> int:
        """Features, hidden states and int64 tokens, documents and depths of the batches."""
        shape, ahead = self.shape, AHEAD + 1
        width = shape.head.feature_size + shape.target.hidden_size
        states = width * shape.states_dtype.itemsize * (ahead if shape.stored else 1)
        return shape.batch.positions * (states + 24 * ahead)

    # ---- the head's passes ----

    def peagle(self) -> dict[str, Parts]:
        """Depth 0 once, then segments, then depth 0 backward (`partition.two_pass_backward`)."""
        batch, method = self.shape.batch, self.shape.method
        columns = batch.segment(self.segments, method, self.shape.multiple)
        rows, anchors = batch.rows, batch.rows * batch.max_anchors
        # Beside several segments depth 0 keeps little of its MLPs: one layer's at a time is back.
        light = self.segments > 1 and columns > 0 and not self.recompute
        again = 0
        if self.recompute:
            again = self.kept.layer_of_context(light=False)
        elif light:
            again = self.kept.layer_of_context(False) - self.kept.layer_of_context(True)
        context = {
            "depth 0": self.kept.context(self.recompute, light),
            "keys and values lent": self.kept.lent(self.recompute),
        }
        elements = rows * columns
        full = self.kept.segment(columns, recompute=False)
        one_layer = full // self.shape.head.num_layers if self.recompute else 0
        segment = {"segment": self.kept.segment(columns, self.recompute)}
        sums = 4 * self.kept.num_borrowed
        fresh = self.size * self.kept.num_borrowed
        before = sums if self.segments > 1 else 0
        narrow = self.size < 4
        first = not elements  # nothing went backward before
        phases = {
            "loss of depth 0": {
                **context,
                **self._missing(first=first, going=False),
                "gradients lent": sums,
                **self._loss(anchors),
            },
            "backward of depth 0": {
                **context,
                **self._missing(first=first, going=True),
                "gradients lent": sums + (fresh if narrow else 0),
                "backward of a layer": again + self._backward(batch.positions, batch.positions),
            },
        }
        if not elements:
            return phases
        first = self.segments == 1
        return phases | {
            "loss of a segment": {
                **context,
                **segment,
                **self._missing(first=first, going=False),
                "gradients lent": before,
                **self._loss(elements),
            },
            "backward of a segment": {
                **context,
                **segment,
                **self._missing(first=first, going=True),
                "gradients lent": fresh + (sums if narrow or before else 0),
                "backward of a layer": one_layer
                + self._backward(elements, elements + batch.positions),
            },
        }

    def _missing(self, *, first: bool, going: bool) -> Parts:
        """Gradients that are not there yet, below 0.

        That of the embeddings comes last of all. Before a first backward pass there is none, and
        as it goes layers' gradients come more slowly than what they kept goes.
        """
        own = self.shape.parameters
        missing = own.trained_numbers("embed_tokens.weight")
        if first:
            head = own.trained_numbers("lm_head.weight")
            there = head + own.in_layers // self.shape.head.num_layers
            missing = own.trained - (there if going else 0)
        return {"gradients": -4 * missing}

    def eagle3(self) -> dict[str, Parts]:
        """All depths, each with what it keeps, then all of it backward."""
        positions, depth = self.shape.batch.positions, self.shape.method.depth
        kept = {"all depths": self.kept.all_depths()}
        anchors = self.shape.batch.rows * self.shape.batch.max_anchors * depth
        backward = self._backward(positions, positions * depth)
        return {
            "loss": {**kept, **self._missing(first=True, going=False), **self._loss(anchors)},
            "backward": {
                **kept,
                **self._missing(first=True, going=True),
                "backward of a layer": backward,
            },
        }

    def _loss(self, graded: int) -> Parts:
        """Hidden states of so many graded elements, a chunk's logits, lm_head's gradient."""
        shape, of = self.shape, self.calibration
        rows = min(shape.chunk_rows, graded)
        is_compiled = shape.device.type == "cuda"
        copies = of.compiled_logits if is_compiled else of.eager_logits
        copies += of.tv_logits if shape.method.loss in ("tv", "kl_tv") else 0
        whole, draft = shape.graded_vocabulary, shape.head.draft_vocab_size
        matrix = draft * shape.head.hidden_size
        # The sum is float32; its rounded copy appears when the last chunk is gone.
        chunk = int(rows * ((whole + draft) * self.size + draft * 4 * copies))
        copy = matrix * self.size if self.size < 4 else 0
        return {
            "graded elements": int(graded * shape.head.hidden_size * of.graded * self.size),
            "logits of a chunk": max(chunk, copy),
            "gradient of lm_head": 4 * matrix,
        }

    def _backward(self, elements: int, keys: int) -> int:
        """Gradients inside of one layer: those of its MLP, or of its attention."""
        head, of = self.shape.head, self.calibration
        query = head.num_attention_heads * head.head_dim
        key = head.num_kv_heads * head.head_dim if self.shape.flex else query
        mlp = of.backward_hidden * head.hidden_size
        mlp += self.kept.of.backward * head.intermediate_size
        # What the MLP kept is gone when attention's turn comes.
        freed = self.kept.of.intermediate * head.intermediate_size
        attention = elements * (3 * query - freed) + keys * 2 * key
        largest = max(
            shape.numel() for n, shape in self.shape.parameters.shapes.items() if "layers." in n
        )
        weight = largest * (self.size + (4 if self.size < 4 else 0))
        return int(max(elements * mlp, attention) * self.size) + weight

    # ---- before and after ----

    def around(self) -> dict[str, Parts]:
        """The target's pass, the gradient of the embeddings, and the optimizer's step."""
        shape = self.shape
        # In the type of the products; what adds it up is counted among the gradients.
        embeddings = shape.parameters.trained_numbers("embed_tokens.weight")
        rounded = embeddings * self.size if self.size < 4 else 0
        phases = {
            "gradient of the embeddings": {"gradient of the embeddings": rounded},
            "optimizer's step": {"optimizer's step": self._optimizer_step()},
        }
        if not shape.stored:
            gone = -4 * shape.parameters.trained
            phases["target's pass"] = {"target's pass": self._target_pass(), "gradients": gone}
        return phases

    def _optimizer_step(self) -> int:
        shape, own = self.shape, self.shape.parameters
        on_gpu = shape.device.type == "cuda"
        largest = max(s.numel() for s in own.shapes.values())
        # AdamW is one kernel on a GPU; elsewhere it computes denominator and step of a parameter.
        adamw = 0 if on_gpu else 8 * largest
        if shape.world_size > 1:
            adamw += 8 * largest  # a block's gradients on their way to their shares
        if shape.optimizer != "muon":
            return adamw
        groups: dict[torch.Size, int] = {}
        for matrix in own.muons:
            groups[matrix] = groups.get(matrix, 0) + matrix.numel()
        # Momenta, their stack, two iterates and the update (`Muon._step_same_shape`).
        numbers = max(groups.values()) // shape.world_size
        return max(adamw, numbers * (12 + 2 * (2 if on_gpu else 4)))

    def _target_pass(self) -> int:
        """One layer of the target, and its aux states before they stand side by side."""
        shape, text = self.shape, self.shape.target.text_config
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        width = shape.head.feature_size + self.calibration.target_hidden * text.hidden_size
        width += 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
        width += 5 * heads * head_dim  # query, repeated keys and values, before and after RoPE
        return int(shape.batch.positions * width * shape.target_dtype.itemsize)
