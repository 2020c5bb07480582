"""The arithmetic of a training step: floating-point operations, a product and its sum as two.

Counted is what a step computes, padding included: matrix products, and of attention the pairs of
elements that see each other. Norms, losses and copies are not.

Sizes as in `training.memory`; P pairs of elements of which one sees the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle.data.batches import BatchStream, anchor_bound
from peagle.models.elements import depth_counts
from peagle.training.step_shape import BatchShape, StepShape

_NEWTON_SCHULZ = 5  # iterations of Muon


@dataclass(frozen=True, slots=True)
class MeanRow:
    """A row of a batch, on average.

    Attributes:
        anchors, bound: supervised anchors, and what batches make room for.
        context_pairs: causal pairs within documents.
        anchor_pairs: what the supervised anchors see of depth 0, themselves included.
    """

    anchors: float
    bound: float
    context_pairs: float
    anchor_pairs: float

    @classmethod
    def of(cls, stream: BatchStream) -> MeanRow:
        """The mean over all rows of a stream."""
        lens, prompts = stream.dataset.start_loc.diff(), stream.dataset.prompt_lens
        rows = len(stream.anchors)
        anchors = (lens - prompts - 1).clamp_min(0)
        # Anchors P - 1 to L - 3 see 1 more than their number of positions.
        seen = anchors * (prompts + lens - 2) // 2
        bounds = (anchor_bound(count, stream.row_length) for count in stream.anchors)
        return cls(
            anchors=sum(stream.anchors) / rows,
            bound=sum(bounds) / rows,
            context_pairs=float((lens * (lens + 1) // 2).sum()) / rows,
            anchor_pairs=float(seen.sum()) / rows,
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """Operations of one step of one process.

    Attributes:
        elements, graded: (anchor, depth) elements computed, and those that have a loss.
        parts: operations by what they are for.
    """

    elements: int
    graded: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def step_work(shape: StepShape, row: MeanRow, segments: int, recompute: bool) -> StepWork:
    """What a step computes.

    Args:
        shape: what is trained.
        row: of its batches.
        segments, recompute: as chosen.
    """
    head, method, batch = shape.head, shape.method, shape.batch
    shares = depth_counts(1_000_000, method.depth, method.cod_ratio, method.cod_floor)
    depths = [share / 1_000_000 for share in shares]
    if method.name == "eagle3":
        depths = [1.0] * (method.depth - 1)
    usual = BatchShape(batch.rows, batch.length, round(row.bound))
    positions = batch.positions
    if method.name == "eagle3":
        deeper = positions * (method.depth - 1)
    else:
        deeper = batch.rows * segments * usual.segment(segments, method, shape.multiple)
    graded = batch.rows * row.anchors * (1 + sum(depths))
    # A forward pass, and two products backward for one forward.
    passes = 4 if recompute else 3
    matrices = shape.parameters.in_layers
    first_qkv = 0
    if method.name != "eagle3":  # one row for all mask slots
        heads = head.num_attention_heads + 2 * head.num_kv_heads
        first_qkv = 2 * head.hidden_size * heads * head.head_dim
    layers = 2 * passes * (matrices * (positions + deeper) - first_qkv * deeper)
    if segments > 1 and not recompute and method.name != "eagle3":
        # Gate and up of depth 0 again, for the gradients of the MLPs.
        mlps = 2 * head.hidden_size * head.intermediate_size * head.num_layers
        layers += 2 * mlps * positions
    # The features want no gradient.
    layers += 4 * head.feature_size * head.hidden_size * positions
    pairs = row.context_pairs + sum(
        depth_share * (row.anchor_pairs + row.anchors * depth)
        for depth, depth_share in enumerate(depths, start=1)
    )
    width = head.num_attention_heads * head.head_dim * head.num_layers
    # Scores and their sums of values; five products backward.
    attention = batch.rows * pairs * width * (14 + (4 if recompute else 0))
    rows_graded = batch.rows * row.anchors * (2 if depths else 1)
    vocabulary = 6 * graded * head.hidden_size * head.draft_vocab_size
    vocabulary += 2 * rows_graded * shape.target.hidden_size * shape.graded_vocabulary
    parts = {
        "layers": layers,
        "attention": attention,
        "vocabulary": vocabulary,
        "optimizer": _muon(shape) if shape.optimizer == "muon" else 0,
        "target": 0 if shape.stored else _target(shape, row),
    }
    whole = {name: round(count) for name, count in parts.items() if count}
    return StepWork(positions + deeper, round(graded), whole)


def _target(shape: StepShape, row: MeanRow) -> float:
    """The frozen target over a batch."""
    text = shape.target.text_config
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    pairs = shape.batch.rows * row.context_pairs
    attention = 4 * pairs * heads * head_dim * shape.target.num_layers
    return 2 * shape.target.num_active * shape.batch.positions + attention


def _muon(shape: StepShape) -> float:
    """Newton-Schulz: a Gram matrix, its square, and a product with the matrix, each time."""
    total = 0
    for matrix in shape.parameters.muons:
        short, long = sorted(matrix)
        total += _NEWTON_SCHULZ * (4 * short * short * long + 2 * short**3)
    return total / shape.world_size
