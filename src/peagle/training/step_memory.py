"""The memory and the arithmetic of a training step, and the number of segments that fits.

The estimate adds up shapes: nothing is loaded and nothing runs. `peagle train --plan
--gpu-memory-gib` uses it for a GPU that is not here, and a CPU, where torch counts no bytes,
chooses S by it. It asks for too much rather than too little: by 0 to 25%, and by more for very
small heads on a GPU (docs/training-scale.md). On a GPU the probe runs a few steps on the largest
batch that the data can give, and torch counts the bytes.

Sizes: B rows, N positions of a row, T = B * N, E deeper elements of a segment's row.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch.optim import Optimizer

from peagle.data.batches import Batch, BatchStream, anchor_bound, map_tensors
from peagle.data.features import HIDDEN_DTYPES, INDEX_NAME, Index, StoredDtype
from peagle.disk import size_text
from peagle.engine.memory_plan import available_ram, device_name, free_and_total
from peagle.engine.placement import resolve_dtype
from peagle.errors import UserError
from peagle.models.checkpoint.packed import Rounding
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.elements import depth_counts
from peagle.models.target_facts import TargetShape
from peagle.training.build import build_correction
from peagle.training.chunked_loss import default_chunk_rows
from peagle.training.config import DataSection, MethodSection, RunSection, TrainConfig
from peagle.training.distributed import ONE_PROCESS, Processes
from peagle.training.element_attention import BLOCK
from peagle.training.inputs import BATCHES_AHEAD, Inputs
from peagle.training.optimizers import Masters, suits_muon
from peagle.training.step import TrainingStep

_WORKSPACE = 64 * 2**20  # of libraries on a GPU


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The memory of a step at its peak.

    Attributes:
        segments, recompute: S, and whether layers are computed again.
        total: bytes.
        parts: bytes by use; empty where the total is measured.
    """

    segments: int
    recompute: bool
    total: int
    parts: dict[str, int]

    def __str__(self) -> str:
        source = "estimated" if self.parts else "measured"
        layers = "recomputed" if self.recompute else "kept"
        size = size_text(self.total)
        return f"memory: {size} at the peak ({source}), S = {self.segments}, layers {layers}"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of one process's batches.

    Attributes:
        rows, length: B and N.
        max_anchors: bound of the supervised anchors of a row, the largest of all batches.
        is_packed: rows may hold several documents.
        anchors: mean supervised anchors of a row.
        context: mean number of earlier tokens that a token sees.
    """

    rows: int
    length: int
    max_anchors: int
    is_packed: bool
    anchors: float
    context: float

    @classmethod
    def of(cls, stream: BatchStream) -> Self:
        """Return the shape of a stream's batches."""
        lengths = stream.dataset.start_loc.diff().double()
        return cls(
            rows=stream.num_rows // stream.world_size,
            length=stream.row_length,
            max_anchors=anchor_bound(max(stream.anchors), stream.row_length),
            is_packed=stream.is_packed,
            anchors=sum(stream.anchors) / len(stream.anchors),
            context=float(lengths.square().sum() / lengths.sum() / 2),
        )

    def deeper(self, method: MethodSection, multiple: int) -> int:
        """Return the elements of a row below depth 0, as `sample_elements` makes room for them."""
        rest = sum(depth_counts(self.max_anchors, method.depth, method.cod_ratio, method.cod_floor))
        return rest + -(self.length + rest) % multiple

    def segment(self, segments: int, method: MethodSection, multiple: int) -> int:
        """Return E, as `split_by_anchor` makes segments; an upper bound where nothing is padded."""
        rest = self.deeper(method, multiple)
        size = min(rest, -(-rest // segments) + method.depth - 2)
        return size + -size % multiple if rest else 0


@dataclass(frozen=True)
class TrainingShape:
    """Everything that the memory of a step of one process depends on.

    `device` is where the step runs; "cuda" needs no GPU to be here. `world_size` processes share
    the float32 weights and the optimizer's states.
    """

    config: TrainConfig
    head: DrafterConfig
    target: TargetShape
    batch: BatchShape
    device: torch.device
    world_size: int = 1

    @cached_property
    def _skeleton(self) -> Drafter:
        with torch.device("meta"):
            return Drafter(self.head)

    @cached_property
    def correction(self) -> dict[str, int]:
        """Return the count of numbers in each parameter of a correction that is trained with the
        head, by name; {} without one.
        """
        if self.config.correction.train != "together":
            return {}
        with torch.device("meta"):
            skeleton = build_correction(self.head.hidden_size, self.config)
        return {f"correction.{name}": p.numel() for name, p in skeleton.named_parameters()}

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Return the count of numbers in each parameter of the head and its correction, by name."""
        own = {name: p.numel() for name, p in self._skeleton.named_parameters()}
        return own | self.correction

    @property
    def num_parameters(self) -> int:
        """Return the count of numbers in all parameters of the head."""
        return sum(self.parameters.values())

    @property
    def trained(self) -> dict[str, int]:
        """Return the `parameters` that are trained."""
        frozen = self.config.head.frozen
        return {name: n for name, n in self.parameters.items() if name not in frozen}

    @property
    def num_frozen(self) -> int:
        """Return the count of numbers in the parameters that are not trained."""
        return self.num_parameters - self.num_trained

    @property
    def num_trained(self) -> int:
        """Return the count of numbers in the parameters that are trained."""
        return sum(self.trained.values())

    @cached_property
    def rounding(self) -> Rounding | None:
        """Return the rounding of the head's linear layers, which then have float32 copies; None:
        none.
        """
        quantization = self.config.head.layer_quantization
        return None if quantization is None else Rounding(self.head, quantization)

    @property
    def num_rounded(self) -> int:
        """Return the count of numbers in the parameters that are rounded."""
        names = () if self.rounding is None else self.rounding.names
        return sum(self.parameters[name] for name in names)

    @property
    def in_layers(self) -> dict[str, int]:
        """Return the `parameters` of the decoder layers."""
        return {name: n for name, n in self.parameters.items() if name.startswith("layers.")}

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the maps of the head's vocabulary."""
        return sum(buffer.nbytes for buffer in self._skeleton.buffers())

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which the head computes."""
        return resolve_dtype(self.config.run.precision, self.device)

    @property
    def target_dtype(self) -> torch.dtype:
        """Return the type in which the target computes."""
        return resolve_dtype(self.config.run.target_dtype, self.device)

    @property
    def is_stored(self) -> bool:
        """Return whether features come from a store, not from a target in this process."""
        return self.config.data.features is not None

    @property
    def kernels(self) -> tuple[bool, bool]:
        """Return whether FlexAttention and torch.compile run."""
        return kernels_of(self.config, self.device)

    @property
    def graded_vocabulary(self) -> int:
        """Return the tokens of the target that training projects (`Objective`)."""
        whole = not self.head.is_pruned or self.config.method.loss in ("tv", "kl_tv")
        return self.head.vocab_size if whole else self.head.draft_vocab_size

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of all processes' float32 states: Muon has one a weight, AdamW two."""
        named = self._skeleton.named_parameters()
        uses_muon = self.config.optimizer.name == "muon"
        muon = sum(p.numel() for n, p in named if uses_muon and suits_muon(n, p.ndim))
        return 4 * (2 * self.num_trained - muon)

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint: float32 weights, optimizer states, frozen weights."""
        weights = 4 * self.num_trained + self.dtype.itemsize * self.num_frozen
        return weights + self.optimizer_bytes + self.buffer_bytes

    @property
    def head_bytes(self) -> int:
        """Return the bytes of the head that the run writes, at most if started from another.

        A new head whose ends are frozen does not store them.
        """
        size, head = getattr(torch, self.config.run.save_dtype).itemsize, self.config.head
        is_whole = head.init is not None or not head.freezes_ends
        count = self.num_parameters if is_whole else self.num_trained
        if self.rounding is None:
            return size * count + self.buffer_bytes
        d2t = 4 * self.head.draft_vocab_size if self.head.is_pruned else 0
        return size * (count - self.num_rounded) + self.rounding.stored_bytes + d2t


def stored_dtype(data: DataSection) -> StoredDtype:
    """Return the type of stored features: the store's where there is one, else of a new one."""
    if data.features is not None and (data.features / INDEX_NAME).is_file():
        return Index.read(data.features).facts.dtype
    return "bf16"


def kernels_of(config: TrainConfig, device: torch.device) -> tuple[bool, bool]:
    """Return whether elements attend by FlexAttention, and whether layers are compiled."""
    # EAGLE-3 has a shape for every depth, each to be compiled: a mask is cheaper there.
    suits = device.type == "cuda" and config.method.name == "peagle"
    attention = config.run.attention
    flex = attention == "flex" or (attention == "auto" and suits)
    # Without FlexAttention nothing is padded: nearly every step has a shape of its own.
    return flex, flex and suits


# ---- memory ----


def estimate_memory(shape: TrainingShape, segments: int, recompute: bool) -> PeakMemory:
    """Estimate the peak of a step: the memory held throughout, and the most that comes and goes.

    Args:
        shape: the model, the batch and the settings that decide it.
        segments, recompute: settings of the two-pass partition; EAGLE-3 has neither.
    """
    trained, narrow = 4 * shape.num_trained, shape.dtype.itemsize < 4
    embeddings = shape.trained.get("embed_tokens.weight", 0)
    # AdamW is one kernel on a GPU; elsewhere it computes denominator and step of a parameter.
    update = 0 if shape.device.type == "cuda" else 8 * max(shape.trained.values())
    if shape.config.optimizer.name == "muon":
        # Momenta of the matrices of one shape, their stack, two iterates and the update.
        update = max(update, 20 * shape.head.num_layers * max(shape.in_layers.values()))
    # Rounded numbers and what their groups need, of a layer at a time.
    rounded = 0 if shape.rounding is None else 6 * shape.rounding.largest
    moments = [
        # The gradient of the embeddings comes last of all, when the activations are gone.
        _passes(shape, segments, recompute),
        {"gradients": trained, "embeddings": 2 * embeddings if narrow else 0},
        {"gradients": trained, "optimizer's step": max(update, rounded)},
    ]
    comes = max(moments, key=lambda parts: sum(parts.values()))
    parts = {name: size for name, size in (_stays(shape) | comes).items() if size}
    return PeakMemory(segments, recompute, sum(parts.values()), parts)


def _stays(shape: TrainingShape) -> dict[str, int]:
    target, share, batch = shape.target, shape.world_size, shape.batch
    has_masters = shape.dtype != torch.float32 or share > 1
    num_copied = shape.num_trained if has_masters else shape.num_rounded
    scales = 0 if shape.rounding is None else shape.rounding.scale_bytes
    in_target = target.num_lm_head if shape.is_stored else target.num_parameters
    if shape.graded_vocabulary < shape.head.vocab_size:
        in_target += shape.graded_vocabulary * target.hidden_size  # rows of lm_head, copied
    states = (shape.head.feature_size + target.hidden_size) * shape.target_dtype.itemsize
    if shape.is_stored:
        states //= shape.target_dtype.itemsize
        states *= HIDDEN_DTYPES[stored_dtype(shape.config.data)].itemsize * (BATCHES_AHEAD + 1)
    return {
        "head": shape.num_parameters * shape.dtype.itemsize + shape.buffer_bytes + scales,
        "float32 weights": 4 * num_copied // share,
        "optimizer": shape.optimizer_bytes // share,
        "target": in_target * shape.target_dtype.itemsize,
        # With int64 tokens, documents and depths.
        "features": batch.rows * batch.length * (states + 24 * (BATCHES_AHEAD + 1)),
        "workspaces": _WORKSPACE if shape.device.type == "cuda" else 0,
    }


def _passes(shape: TrainingShape, segments: int, recompute: bool) -> dict[str, int]:
    """Return the bytes that the head's forward and backward passes take at their peak, by use."""
    head, batch, method = shape.head, shape.batch, shape.config.method
    positions, size, layers = batch.rows * batch.length, shape.dtype.itemsize, head.num_layers
    flex, compiled = shape.kernels
    context_scores = positions * batch.length if batch.is_packed else 0
    if method.name == "eagle3":  # Each depth attends to itself and to those before.
        pairs = method.depth * (method.depth + 1) // 2 - 1
        elements, keys = positions * (method.depth - 1), positions * pairs
        scores, context_scores, borrowed = keys * batch.length, positions * batch.length, 0
        graded = batch.rows * batch.max_anchors * method.depth
    else:
        columns = batch.segment(segments, method, BLOCK if flex else 1)
        elements = batch.rows * columns
        keys = elements + positions if elements else 0
        scores = elements * (columns + batch.length)
        borrowed = 2 * head.num_kv_heads * head.head_dim * positions * layers
        graded = max(elements, batch.rows * batch.max_anchors)
    is_light = segments > 1 and elements > 0 and not recompute
    context = _layer_bytes(shape, positions, positions, context_scores, is_light=is_light)
    segment = _layer_bytes(shape, elements, keys, scores)
    states = 3 * head.hidden_size + (4 if compiled else 2) * head.intermediate_size
    backward = max(positions, elements) * states * size
    backward += max(shape.in_layers.values()) * (size + (4 if size < 4 else 0))
    if recompute:
        backward += max(context, segment)
        context, segment = (n * head.hidden_size * size for n in (positions, elements))
    # Keys and values, the float32 sums of their gradients, and the gradients of one segment.
    lent = 4 + size // (1 if recompute else 2) + (size if segments > 1 or size < 4 else 0)
    in_layers = sum(shape.in_layers.values())
    # The layers' gradients of the first backward pass come as their activations go.
    gradients = in_layers // layers if segments == 1 else in_layers
    return {
        "depth 0": layers * context + 2 * positions * head.hidden_size * size,
        "deeper elements": layers * segment + (0 if flex else context_scores + scores),
        "keys and values lent": borrowed * lent,
        "correction": _correction_bytes(shape, positions, elements) if shape.correction else 0,
        "a loss, or a layer's gradients": max(_loss_bytes(shape, graded), backward),
        "gradients": 4 * (shape.trained.get("lm_head.weight", 0) + gradients),
    }


def _layer_bytes(
    shape: TrainingShape, elements: int, keys: int, scores: int, *, is_light: bool = False
) -> int:
    """Return the bytes a layer keeps of elements with `keys` keys each; light: less of its MLP."""
    head, size = shape.head, shape.dtype.itemsize
    flex, compiled = shape.kernels
    query, key = (n * head.head_dim for n in (head.num_attention_heads, head.num_kv_heads))
    # Compiled: what enters the layer, what attention adds to, gate and up; else autograd keeps the
    # input, the normed input and the output of each norm, and all of the MLP's states.
    numbers = 2 * head.hidden_size + 2 * query + key
    wide = head.num_attention_heads
    if not is_light:
        numbers += (2 if compiled else 4) * head.intermediate_size
    if not compiled:
        wide += (2 if is_light else 4) * head.hidden_size
    if head.qk_norm:
        numbers += query + 2 * key
        wide += 0 if compiled else query + key
    kept = elements * (numbers * size + 4 * wide)
    # A dense mask is a number for each pair, and repeats the keys for all heads.
    return kept + (2 * key * keys if flex else 2 * query * keys + scores) * size


def _correction_bytes(shape: TrainingShape, positions: int, elements: int) -> int:
    """Return the bytes that a correction of elements keeps, and those of what it borrows."""
    own, size, width = shape.config.correction, shape.dtype.itemsize, shape.head.hidden_size
    # Embeddings, scaled ones, terms and corrected states; the rest is of the term's own width.
    numbers = 4 * width + own.rank + 4 * own.width
    # The gradient of the borrowed embedding, and its float32 sum.
    return elements * numbers * size + positions * width * (size + 4)


def _loss_bytes(shape: TrainingShape, graded: int) -> int:
    """Return the bytes of graded hidden states, the logits of a chunk, and lm_head's gradient."""
    head, size = shape.head, shape.dtype.itemsize
    target, draft = shape.graded_vocabulary, head.draft_vocab_size
    rows = shape.config.run.loss_chunk_rows or default_chunk_rows(target, draft, shape.device)
    copies = 2 if shape.device.type == "cuda" else 4
    copies += 3 if shape.config.method.loss in ("tv", "kl_tv") else 0
    chunk = min(rows, graded) * ((target + draft) * size + draft * 4 * copies)
    matrix = shape.trained.get("lm_head.weight", 0)
    rounded = matrix * size if size < 4 else 0
    return graded * head.hidden_size * 4 * size + max(chunk, rounded) + 4 * matrix


# ---- arithmetic ----


def estimate_flops(shape: TrainingShape, recompute: bool) -> dict[str, int]:
    """Return floating-point operations of a mean step by purpose; a product and its sum are two.

    Matrix products count, and pairs of elements that see each other; norms, losses, copies and
    padding of the deeper elements do not. A backward pass is two forward ones.
    """
    head, batch, method, target = shape.head, shape.batch, shape.config.method, shape.target
    positions, anchors = batch.rows * batch.length, batch.rows * batch.anchors
    if method.name == "eagle3":
        deeper = method.depth - 1.0
        elements = positions * method.depth
    else:
        deeper = sum(depth_counts(10**6, method.depth, method.cod_ratio, method.cod_floor)) / 10**6
        elements = positions + anchors * deeper
    graded, passes = anchors * (1 + deeper), 4 if recompute else 3
    width = head.num_attention_heads * head.head_dim * head.num_layers
    products = 3 if "lm_head.weight" in shape.trained else 2
    vocabulary = 2 * products * graded * head.hidden_size * head.draft_vocab_size
    target_rows = anchors * (2 if deeper else 1)
    parts = {
        # The features want no gradient.
        "layers": 2 * passes * sum(shape.in_layers.values()) * elements
        + 4 * head.feature_size * head.hidden_size * positions,
        "attention": (2 + 4 * passes) * elements * batch.context * width,
        "vocabulary": vocabulary + 2 * target_rows * target.hidden_size * shape.graded_vocabulary,
        "correction": round(6 * sum(shape.correction.values()) * anchors * deeper),
        "target": 0 if shape.is_stored else 2 * target.num_active * positions,
    }
    return {name: round(count) for name, count in parts.items() if count}


# ---- choosing ----


# Numbers of segments that "auto" tries; more are not worth a pass each.
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Shares of what is free that a run may plan to take.
_GPU_SHARE, _RAM_SHARE = 0.9, 0.5
# A step is not tried if its estimate is that many budgets: the estimate may be so far off.
_MAX_TRIED_BUDGETS = 1.5
_SHORTEST = 64
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a process may take for its steps.

    Attributes:
        size: bytes.
        source: where that comes from, for messages.
        is_given: whether the user asked for it.
    """

    size: int
    source: str
    is_given: bool

    @classmethod
    def of(cls, run: RunSection, device: torch.device, gpu_gib: float | None = None) -> Self:
        """Return the budget of a run; ask before anything is loaded.

        `gpu_gib` is the memory of a GPU that is not here, in GiB.
        """
        if run.memory_gib is not None:
            source = f"run.memory_gib is {run.memory_gib:g}"
            return cls(int(run.memory_gib * _GIB), source, True)
        share, own = _GPU_SHARE, 0
        if gpu_gib is not None:
            free, where = int(gpu_gib * _GIB), "of a GPU"
        elif (card := free_and_total(device)) is not None:
            free, where = card[0], f"free on {device_name(device)}"
            own = torch.cuda.memory_allocated(device)
        else:
            free, where, share = available_ram(), "of memory available here", _RAM_SHARE
        size = own + int(free * share)
        return cls(size, f"{share:.0%} of the {size_text(free)} {where}", False)


def choose_memory(
    shape: TrainingShape,
    run: RunSection,
    budget: Budget,
    *,
    measure: Callable[[int, bool], int | None] | None = None,
    stored: tuple[int, bool] | None = None,
    processes: Processes = ONE_PROCESS,
) -> PeakMemory:
    """Choose the first way to run a step that fits: few segments first, recomputed layers last.

    Fixed values of the configuration stay. If all are fixed and the user named no budget,
    nothing is measured. All processes take the largest number of segments that any of them needs.

    Args:
        measure: returns the peak bytes of a step with a number of segments, recomputed or not;
            None if they do not fit. Without it the estimate decides.
        stored: segments and recomputation of the run that this one resumes; fewer are not tried.

    Raises:
        UserError: no way fits; it says what would.
    """
    ways = [estimate_memory(shape, *way) for way in step_ways(run, shape.config.method.name)]
    if len(ways) == 1 and not budget.is_given:
        return ways[0]
    first = next((i for i, w in enumerate(ways) if (w.segments, w.recompute) == stored), 0)
    found = len(ways)
    for index in range(first, len(ways)):
        way = ways[index]
        if measure is not None and way.total <= _MAX_TRIED_BUDGETS * budget.size:
            peak = measure(way.segments, way.recompute)
            if peak is None:
                continue
            ways[index] = way = dataclasses.replace(way, total=peak, parts={})
        if way.total <= budget.size:
            found = index
            break
    found = processes.most(found)
    if found == len(ways):
        least = min(ways[first:], key=lambda way: way.total)
        raise UserError(_refusal(shape, run, budget, least))
    return ways[found]


def step_ways(run: RunSection, method: str) -> Iterator[tuple[int, bool]]:
    """Yield the segments and recomputation that the configuration leaves open, cheap ones first."""
    if method == "eagle3":
        yield 1, False
        return
    recompute = run.recompute_layers
    for again in (False, True) if recompute == "auto" else (recompute,):
        for segments in SEGMENTS if run.segments == "auto" else (run.segments,):
            yield segments, again


def _refusal(shape: TrainingShape, run: RunSection, budget: Budget, least: PeakMemory) -> str:
    batch, is_peagle = shape.batch, shape.config.method.name == "peagle"
    how = f" in {least.segments} segment" + "s" * (least.segments > 1) if is_peagle else ""
    again = " with recomputed layers" if least.recompute else ""
    parts = sorted(estimate_memory(shape, least.segments, least.recompute).parts.items())
    parts = sorted(parts, key=lambda part: -part[1])[:4]
    text = (
        f"A step may take {size_text(budget.size)} ({budget.source}); one of {batch.rows} x "
        f"{batch.length:,} positions takes about {size_text(least.total)}{how}{again} "
        f"({', '.join(f'{name} {size_text(size)}' for name, size in parts)})."
    )
    if is_peagle and run.segments != "auto":
        text += ' Set run.segments = "auto".'
    if is_peagle and run.recompute_layers is False:
        text += " Set run.recompute_layers = true."
    for rows, length in _smaller(batch.rows, batch.length):
        anchors = min(length, batch.max_anchors)
        smaller = dataclasses.replace(batch, rows=rows, length=length, max_anchors=anchors)
        other = dataclasses.replace(shape, batch=smaller)
        peak = estimate_memory(other, least.segments, least.recompute).total
        if peak <= budget.size:
            keys = (
                "data.batch_tokens"
                if length == batch.length
                else "data.max_length = data.batch_tokens"
            )
            return f"{text} {keys} = {rows * length} would fit ({size_text(peak)})."
    text += (
        " No shorter batch would fit: take a smaller head (head.num_layers, head.draft_vocab_size) "
        "or allow more memory (run.memory_gib)."
    )
    if not shape.is_stored:
        size = shape.target.num_parameters * shape.target_dtype.itemsize
        text += f" Stored features (`peagle data features`) save the target's {size_text(size)}."
    return text


def _smaller(rows: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield smaller batches as (rows, length): fewer rows first, then shorter ones."""
    while rows > 1:
        rows //= 2
        yield rows, length
    while length >= 2 * _SHORTEST:
        length //= 2
        yield 1, length


class MemoryProbe:
    """Runs steps of a head and measures their needs; weights and optimizers stay as they are.

    A context manager: inside, the optimizers hold their states, of zeros. `batch` is the largest
    one, on the host; `build_step` makes a step with so many segments, with or without
    recomputation, that waits for no other process.
    """

    def __init__(
        self,
        masters: Masters,
        optimizers: list[Optimizer],
        inputs: Inputs,
        batch: Batch,
        build_step: Callable[[int, bool], TrainingStep],
    ) -> None:
        self._masters, self._optimizers = masters, optimizers
        self._inputs, self._batch, self._build_step = inputs, batch, build_step

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self._inputs.device)
        for _, parameter in self._masters.named():
            parameter.grad = torch.zeros_like(parameter)
        # With gradients of 0 and at a rate of 0 a step changes no weight.
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
        self._masters.publish()
        self._optimizer_peak = torch.cuda.max_memory_allocated(self._inputs.device)
        return self

    def __exit__(self, *_: object) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
        torch.cuda.empty_cache()

    def peak(self, segments: int, recompute: bool) -> int | None:
        """Return the bytes on the GPU at the peak of a step; None where they do not fit."""
        peak = None
        try:
            for _ in range(2):  # The first run compiles.
                peak = self._run(self._build_step(segments, recompute))
        except torch.OutOfMemoryError:
            peak = None
        self._masters.head.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None if peak is None else max(peak, self._optimizer_peak)

    def _run(self, step: TrainingStep) -> int:
        generator = torch.Generator().manual_seed(0)
        laid_out = dataclasses.replace(self._batch, layout=step.lay_out(self._batch, generator))
        torch.cuda.reset_peak_memory_stats(self._inputs.device)
        [(batch, states)] = self._inputs.source(lambda _: laid_out).range(0, 1)
        stored = self._inputs.config.data.features is not None
        # What waits beside the batch at hand.
        waiting = (batch, states) if stored else batch
        ahead = [map_tensors(waiting, torch.clone) for _ in range(BATCHES_AHEAD)]
        step.backward(batch, states, generator)
        del ahead
        self._masters.head.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_allocated(self._inputs.device)
