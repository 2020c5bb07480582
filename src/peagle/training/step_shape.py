"""What decides memory and work of a training step, from configurations alone.

Sizes: B rows, N positions of a row, T = B * N, E deeper elements of a segment's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from peagle.data.batches import BatchStream, anchor_bound
from peagle.data.feature_format import HIDDEN_DTYPES, INDEX_NAME, Index, StoredDtype
from peagle.engine.placement import resolve_dtype
from peagle.models.drafter import Drafter
from peagle.models.drafter_config import DrafterConfig
from peagle.models.elements import depth_counts
from peagle.models.target_shape import TargetShape
from peagle.training.chunked_loss import default_chunk_rows
from peagle.training.config import DataSection, MethodSection, TrainConfig
from peagle.training.element_attention import BLOCK
from peagle.training.optimizers import suits_muon


@dataclass(frozen=True, slots=True)
class HeadParameters:
    """The parameters of a head.

    Attributes:
        shapes: by name.
        frozen: names of those that are not trained.
        buffer_bytes: of the maps of its vocabulary.
    """

    shapes: dict[str, torch.Size]
    frozen: frozenset[str]
    buffer_bytes: int

    @classmethod
    def of(cls, config: DrafterConfig, freeze_embeddings: bool) -> HeadParameters:
        """Those of a head of this shape; nothing is allocated."""
        with torch.device("meta"):
            head = Drafter(config)
        return cls(
            {name: parameter.shape for name, parameter in head.named_parameters()},
            frozenset({"embed_tokens.weight"} if freeze_embeddings else ()),
            sum(buffer.nbytes for buffer in head.buffers()),
        )

    @property
    def total(self) -> int:
        """Numbers in all of them."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def trained(self) -> int:
        """Numbers in those that are trained."""
        return sum(s.numel() for name, s in self.shapes.items() if name not in self.frozen)

    def trained_numbers(self, name: str) -> int:
        """Numbers in a parameter, 0 if it is frozen."""
        return 0 if name in self.frozen else self.shapes[name].numel()

    @property
    def in_layers(self) -> int:
        """Numbers in the decoder layers."""
        return sum(s.numel() for name, s in self.shapes.items() if name.startswith("layers."))

    @property
    def muons(self) -> list[torch.Size]:
        """Shapes of the matrices that Muon would take."""
        return [shape for name, shape in self.shapes.items() if suits_muon(name, len(shape))]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch, as far as memory goes, of one process.

    Attributes:
        rows, length: B and N.
        max_anchors: bound of supervised anchors of a row, the largest of all batches.
        is_packed: rows may hold several documents, so that depth 0 is not plainly causal.
    """

    rows: int
    length: int
    max_anchors: int
    is_packed: bool = True

    @classmethod
    def of(cls, stream: BatchStream) -> BatchShape:
        """The shape of a stream's batches."""
        most = anchor_bound(max(stream.anchors), stream.row_length)
        rows = stream.num_rows // stream.world_size
        return cls(rows, stream.row_length, most, stream.is_packed)

    @property
    def positions(self) -> int:
        """T."""
        return self.rows * self.length

    def deeper(self, method: MethodSection, multiple: int) -> int:
        """Elements of a row below depth 0, as `sample_elements` makes room for them."""
        rest = sum(depth_counts(self.max_anchors, method.depth, method.cod_ratio, method.cod_floor))
        return rest + -(self.length + rest) % multiple

    def segment(self, segments: int, method: MethodSection, multiple: int) -> int:
        """E, as `split_by_anchor` makes segments; what they are at most where nothing is padded."""
        rest = self.deeper(method, multiple)
        if not rest:
            return 0
        size = min(rest, -(-rest // segments) + method.depth - 2)
        return size + -size % multiple


@dataclass(frozen=True)
class StepShape:
    """What decides the memory of a step.

    Attributes:
        head, method: the head, and how it is trained.
        parameters: of the head.
        target: the frozen target.
        batch: of one process.
        optimizer: "adamw" or "muon".
        dtype, target_dtype: in which head and target compute.
        device: where; "cuda" needs no GPU to be here.
        flex, compiled: FlexAttention, and layers through torch.compile.
        stored: features come from a store, not from the target in this process.
        states_dtype: of features and hidden states as they are read or computed.
        loss_chunk_rows: as configured.
        num_positions: of the angles of RoPE.
        world_size: processes that share float32 weights and the optimizer's states.
    """

    head: DrafterConfig
    method: MethodSection
    parameters: HeadParameters
    target: TargetShape
    batch: BatchShape
    optimizer: str
    dtype: torch.dtype
    target_dtype: torch.dtype
    device: torch.device
    flex: bool
    compiled: bool
    stored: bool
    states_dtype: torch.dtype
    loss_chunk_rows: int | None
    num_positions: int
    world_size: int = 1

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        head: DrafterConfig,
        target: TargetShape,
        batch: BatchShape,
        device: torch.device,
        *,
        world_size: int = 1,
    ) -> StepShape:
        """The steps of a run."""
        run, data = config.run, config.data
        flex, compiled = kernels_of(config, device)
        stored, target_dtype = data.features is not None, resolve_dtype(run.target_dtype, device)
        longest = max(data.max_length, data.batch_tokens) + config.method.depth
        return cls(
            head=head,
            method=config.method,
            parameters=HeadParameters.of(head, config.head.freeze_embeddings),
            target=target,
            batch=batch,
            optimizer=config.optimizer.name,
            dtype=resolve_dtype(run.precision, device),
            target_dtype=target_dtype,
            device=device,
            flex=flex,
            compiled=compiled,
            stored=stored,
            states_dtype=HIDDEN_DTYPES[stored_dtype(data)] if stored else target_dtype,
            loss_chunk_rows=run.loss_chunk_rows,
            num_positions=max(head.max_position_embeddings, longest),
            world_size=world_size,
        )

    @property
    def multiple(self) -> int:
        """What elements are padded to."""
        return BLOCK if self.flex else 1

    @cached_property
    def graded_vocabulary(self) -> int:
        """Tokens of the target that training projects (`Objective`)."""
        whole = not self.head.is_pruned or self.method.loss in ("tv", "kl_tv")
        return self.head.vocab_size if whole else self.head.draft_vocab_size

    @property
    def chunk_rows(self) -> int:
        """Elements whose logits are in memory at once."""
        sizes = (self.graded_vocabulary, self.head.draft_vocab_size)
        return self.loss_chunk_rows or default_chunk_rows(*sizes, self.device)

    @property
    def optimizer_bytes(self) -> int:
        """Its float32 states, of all processes together: Muon has one a weight, AdamW two."""
        own = self.parameters
        num_muon = sum(s.numel() for s in own.muons) if self.optimizer == "muon" else 0
        return 4 * (2 * own.trained - num_muon)

    @property
    def has_masters(self) -> bool:
        """Whether float32 copies of the weights are kept; `ShardedMasters` are always copies."""
        return self.dtype != torch.float32 or self.world_size > 1


def stored_dtype(data: DataSection) -> StoredDtype:
    """Type of the stored features: of those that are there, else of those that would be made."""
    if data.features is not None and (data.features / INDEX_NAME).is_file():
        return Index.read(data.features).facts.dtype
    return "bf16"


def kernels_of(config: TrainConfig, device: torch.device) -> tuple[bool, bool]:
    """Whether elements attend by FlexAttention, and whether layers are compiled."""
    # EAGLE-3 has a shape for every depth, each to be compiled: a mask is cheaper there.
    suits = device.type == "cuda" and config.method.name == "peagle"
    attention = config.run.attention
    return attention == "flex" or (attention == "auto" and suits), suits
