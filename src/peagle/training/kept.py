"""What the head's layers keep for their backward pass, in bytes.

Sizes as in `training.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle.training.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers that a layer keeps of one element for its backward pass, beside those of attention.

    Attributes:
        hidden, wide: of width D, in the type of the products and in float32.
        intermediate: of width I.
        backward: of width I, what its gradients take at most beside it.
    """

    hidden: float
    wide: float
    intermediate: float
    backward: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What shapes do not tell.

    Attributes:
        compiled: the compiler keeps what enters the layer, what attention adds to, and gate and up;
            norms, RoPE and silu(gate) * up are computed again.
        eager: as autograd keeps it: input, normed input and output of each norm; gate and up, silu
            of the one and its product with the other.
        compiled_light, eager_light: depth 0 beside several segments, whose MLPs are computed again.
        graded: copies of a graded element's hidden state: gathered, normed, its gradient.
        backward_hidden: gradients of width D inside of a layer that are alive at once.
        compiled_logits, eager_logits: float32 copies of a chunk's draft logits; tv_logits more
            where the loss looks at the variation.
        target_hidden: tensors of width H of a target layer that are alive at once.
        workspace: of libraries on a GPU, and whatever is small.
        fragments: share of what comes and goes that a GPU's allocator holds beside it.
    """

    compiled: Kept = Kept(hidden=2, wide=0, intermediate=2, backward=4)
    eager: Kept = Kept(hidden=2, wide=4, intermediate=4, backward=2)
    compiled_light: Kept = Kept(hidden=2, wide=0, intermediate=0, backward=4)
    eager_light: Kept = Kept(hidden=2, wide=2, intermediate=0, backward=2)
    graded: float = 4
    backward_hidden: float = 3
    compiled_logits: float = 2
    eager_logits: float = 4
    tv_logits: float = 3
    target_hidden: float = 8
    workspace: int = 256 * 2**20
    fragments: float = 0.05


CALIBRATION = Calibration()


class KeptBytes:
    """Bytes that passes of the head keep.

    Attributes:
        of: what a layer keeps.
        num_borrowed: numbers in the keys and values of depth 0 that segments borrow.
    """

    def __init__(self, shape: StepShape, calibration: Calibration) -> None:
        self.of = calibration.compiled if shape.compiled else calibration.eager
        self._light = calibration.compiled_light if shape.compiled else calibration.eager_light
        self._shape, self._head = shape, shape.head
        self._size = shape.dtype.itemsize
        head = shape.head
        self._query = head.num_attention_heads * head.head_dim
        self._key = head.num_kv_heads * head.head_dim
        batch = shape.batch
        self._rows, self._length, self._positions = batch.rows, batch.length, batch.positions
        self.num_borrowed = 2 * self._key * batch.positions * head.num_layers

    def context(self, recompute: bool, light: bool) -> int:
        """The depth-0 pass: what enters the first layer, all layers, what leaves the last."""
        layers = self._head.num_layers
        ends = self._entry() + self._positions * self._head.hidden_size * self._size
        mask = self._mask(self._length, self._length) if self._shape.batch.is_packed else 0
        if recompute:
            inputs = self._positions * self._head.hidden_size * self._size * layers
            return ends + inputs + mask
        return ends + mask + layers * self.layer_of_context(light)

    def layer_of_context(self, light: bool) -> int:
        """One layer of the depth-0 pass, whose MLP may be computed again."""
        keys = 0 if self._shape.flex else 2 * self._query * self._positions
        scores = 0
        if self._shape.batch.is_packed:
            scores = self._scores(self._length, self._length)
        of = self._light if light else self.of
        return self._layer(self._positions, of) + keys * self._size + scores

    def lent(self, recompute: bool) -> int:
        """The keys and values of depth 0, beside what is counted above.

        With recomputation both are copies, else the keys are those that attention keeps.
        """
        width = 2 * self._key if recompute else self._key
        return width * self._positions * self._size * self._head.num_layers

    def segment(self, columns: int, recompute: bool) -> int:
        """A segment of so many columns; the first layer reads one row for all of them."""
        elements, layers = self._rows * columns, self._head.num_layers
        if not elements:
            return 0
        hidden = elements * self._head.hidden_size
        mask = self._mask(columns, self._length + columns)
        if recompute:
            return hidden * self._size * (layers - 1) + mask
        first = hidden * (self.of.hidden * self._size + self.of.wide * 4) / 2
        keys = elements + self._positions
        widths = 2 * (self._key if self._shape.flex else self._query)
        layer = self._layer(elements, self.of) + widths * keys * self._size
        layer += self._scores(columns, self._length + columns)
        return layers * layer - int(first) + mask

    def all_depths(self) -> int:
        """Every depth of EAGLE-3's training-time test; keys and values of the depths before."""
        depth, layers = self._shape.method.depth, self._head.num_layers
        pairs = depth * (depth + 1) // 2
        widths = 2 * (self._key if self._shape.flex else self._query)
        keys = widths * self._positions * self._size * pairs
        scores = self._scores(self._length, self._length) * pairs
        mask = self._mask(self._length, self._length) * pairs
        one = layers * self._layer(self._positions, self.of)
        # A value is a view of the projection that it comes from.
        projected = (self._query + 2 * self._key) * self._positions * self._size
        one += self._entry(eagle3=True) + projected * layers
        return layers * (keys + scores) + mask + depth * one

    def _layer(self, elements: int, of: Kept) -> int:
        """A layer but for its keys and values: hidden states, MLP, rotated heads, attention."""
        head = self._head
        numbers = of.hidden * head.hidden_size + of.intermediate * head.intermediate_size
        numbers += 2 * self._query + self._key
        wide = of.wide * head.hidden_size + head.num_attention_heads
        if head.qk_norm:
            numbers += self._query + 2 * self._key
            wide += 0 if self._shape.compiled else self._query + self._key
        return int(elements * (numbers * self._size + wide * 4))

    def _entry(self, *, eagle3: bool = False) -> int:
        """Embeddings, and features as fc reads them."""
        shape, head, size = self._shape, self._head, self._size
        hidden = size
        if not shape.compiled:
            hidden += 4 + size + (4 if size < 4 else 0)
        width = 0
        if head.norm_before_fc or head.fc_norm:
            width = size + 4 + (4 if size < 4 else 0)
        if shape.dtype != shape.states_dtype:
            width += size
        features = 0 if eagle3 else width * head.feature_size
        return self._positions * (hidden * head.hidden_size + features)

    def _scores(self, queries: int, keys: int) -> int:
        """What dense attention makes of its mask in each layer: numbers to add to the scores."""
        return 0 if self._shape.flex else self._rows * queries * keys * self._size

    def _mask(self, queries: int, keys: int) -> int:
        """The boolean mask of dense attention, one for all layers."""
        return 0 if self._shape.flex else self._rows * queries * keys
