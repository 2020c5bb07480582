"""The layers of a decode step of an FP8 model and its head: their work, and the engine's calls.

Weights are random. A layer has as many copies of its weights or caches as the L2 cannot hold, and
one call for each. Linear layers of the target are FP8 with 128 x 128 scales; the router, lm_head
and the head are bfloat16.

Shapes: T tokens, H width, C experts chosen for each token, S = T * C assignments, E experts,
I width of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from statistics import mean
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from fp8_products import Fp8Weight, reference
from shapes import Shape, make_config, make_head_config, random_fp8
from torch import Tensor, nn

from peagle.kernels.attention.paged_attention import (
    AttentionShape,
    NewKeyValues,
    Workspace,
    choose_config,
    paged_attention,
)
from peagle.kernels.launch import DeviceLimits
from peagle.kernels.linear import experts as grouped
from peagle.kernels.linear.experts import ExpertWeights, Gate
from peagle.kernels.linear.fp8_activations import BLOCK, QuantisedRows, quantise
from peagle.kernels.linear.fp8_linear import (
    fits_fp8,
    fp8_obstacle,
    fp8_product,
    is_own,
    library_product,
)
from peagle.kernels.linear.packed_weights import PackedWeight, make_fp8
from peagle.kernels.linear.router import route
from peagle.models.drafter import DrafterMLP
from peagle.models.packed_layers import PackedLinear
from peagle.models.skinny import use_skinny

DTYPE = torch.bfloat16
SIZE = DTYPE.itemsize
ROUTINGS = 12  # calls of experts, each with a routing of its own
CACHE_BLOCK = 16  # positions of a block of the cache
Owner = Literal["target", "head"]
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all layers share.

    Attributes:
        device: where they run.
        context: positions that a sequence attends to, its queries included.
        queries: rows of a sequence in a step: its newest token and its drafts.
        rotated_bytes: bytes that the copies of a layer have together, at least.
    """

    device: torch.device
    context: int
    queries: int
    rotated_bytes: int

    def copies(self, num_bytes: float) -> int:
        return max(1, -(-self.rotated_bytes // int(num_bytes)))

    def random(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device=self.device).normal_()

    def sequences(self, tokens: int) -> tuple[int, int]:
        """Return the sequences of so many tokens, and the queries of each."""
        queries = min(tokens, self.queries)
        return -(-tokens // queries), queries


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must be read and written, and floating-point operations."""

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another way to compute a layer, or the quantising before it.

    Attributes:
        name: as printed; calls: one for each copy.
        expected: result of the first call, in float32.
        largest_error: relative error that rounding may cause.
    """

    name: str
    calls: list[Call]
    expected: Callable[[], Tensor]
    largest_error: float = 1e-2

    def error(self) -> float:
        """Return the relative error of the first call."""
        expected, out = self.expected(), self.calls[0]()
        out = out.dequantise() if isinstance(out, QuantisedRows) else out.float()
        return float((out[: len(expected)] - expected).norm() / expected.norm())


def quantising(x: Tensor) -> Candidate:
    """Return the quantising of x, whose numbers keep four bits."""
    return Candidate("quantise", [partial(quantise, x)], x.float, 2**-3)


class Layer(ABC):
    """One kind of layer.

    Attributes:
        name: as printed; owner: the model that has it.
        per_step: how often a step runs it. 0: it is part of no sum.
        is_fp8: its weights are FP8.
        is_compiled: torch.compile makes its kernels.
    """

    is_fp8 = False
    is_compiled = False

    def __init__(self, setting: Setting, name: str, owner: Owner, per_step: int) -> None:
        self.setting, self.name, self.owner, self.per_step = setting, name, owner, per_step

    @abstractmethod
    def work(self, tokens: int) -> Work: ...

    @abstractmethod
    def calls(self, tokens: int) -> list[Call]:
        """Return the engine's calls, one for each copy."""

    def candidates(self, tokens: int) -> tuple[list[Candidate], dict[str, str]]:
        """Return other ways, and why a way is not there, by name."""
        return [], {}


class Linear(Layer):
    """A linear layer of bfloat16, in Triton for few rows and else in the library."""

    def __init__(self, setting: Setting, name: str, owner: Owner, per_step: int, n: int, k: int):
        super().__init__(setting, name, owner, per_step)
        self.n, self.k = n, k

    @property
    def weight_bytes(self) -> float:
        return self.n * self.k * SIZE

    def work(self, tokens: int) -> Work:
        moved = self.weight_bytes + tokens * (self.n + self.k) * SIZE
        return Work(moved, 2 * tokens * self.n * self.k)

    @cached_property
    def modules(self) -> list[nn.Module]:
        found = nn.ModuleList()
        for _ in range(self.setting.copies(self.weight_bytes)):
            linear = nn.Linear(self.k, self.n, bias=False, device="meta")
            weight = self.setting.random(self.n, self.k) * self.k**-0.5
            linear.weight = nn.Parameter(weight, requires_grad=False)
            found.append(linear)
        use_skinny(found)
        return list(found)

    def calls(self, tokens: int) -> list[Call]:
        x = self.setting.random(tokens, self.k)
        return [partial(module, x) for module in self.modules]


class Fp8Linear(Linear):
    """A linear layer of FP8: read as stored for up to 256 rows on a card of compute capability 9
    (128 elsewhere); for more rows it is unpacked to bfloat16 each time, and the library multiplies.
    """

    is_fp8 = True

    @property
    def weight_bytes(self) -> float:
        return fp8_bytes(self.n, self.k)

    @cached_property
    def weight(self) -> Fp8Weight:
        copies = self.setting.copies(self.weight_bytes)
        return Fp8Weight(*random_fp8((copies, self.n, self.k), self.setting.device))

    @cached_property
    def packed(self) -> list[PackedWeight]:
        packed = make_fp8(self.weight.q, self.weight.scale, (BLOCK, BLOCK))
        return [packed.expert(i) for i in range(packed.num_experts)]

    @cached_property
    def modules(self) -> list[nn.Module]:
        return [PackedLinear(weight) for weight in self.packed]

    def candidates(self, tokens: int) -> tuple[list[Candidate], dict[str, str]]:
        if reason := misfit(self.n, self.k) or fp8_obstacle(self.setting.device):
            return [], {"scaled_mm": reason}
        x = self.setting.random(tokens, self.k)
        rows = quantise(x)
        expected = cache(partial(reference, rows, self.weight.expert(0)))
        products: dict[str, Callable[..., Tensor]] = {"scaled_mm": library_product}
        if is_own(tokens, self.n):
            products["gluon"] = fp8_product
        weights = [(weight.fp8_numbers(), weight.scale) for weight in self.packed]
        return [
            quantising(x),
            *(
                Candidate(name, [partial(call, rows.q, rows.scale, *w) for w in weights], expected)
                for name, call in products.items()
            ),
        ], {}


def fp8_bytes(n: int, k: int) -> int:
    """Return the bytes of a matrix and its scales."""
    return n * k + 4 * -(-n // BLOCK) * -(-k // BLOCK)


def misfit(*sizes: int) -> str | None:
    """Return why sizes do not suit the candidates."""
    odd = [size for size in sizes if size % BLOCK]
    return f"{odd[0]} is no multiple of {BLOCK}" if odd else None


class HeadMLP(Layer):
    """The SwiGLU of a head and its down projection."""

    def __init__(self, setting: Setting, per_step: int, width: int, inner: int) -> None:
        super().__init__(setting, "SwiGLU and down", "head", per_step)
        self.width, self.inner = width, inner

    def work(self, tokens: int) -> Work:
        weights = 3 * self.width * self.inner
        return Work((weights + 2 * tokens * self.width) * SIZE, 2 * tokens * weights)

    @cached_property
    def modules(self) -> nn.ModuleList:
        sizes: Any = SimpleNamespace(hidden_size=self.width, intermediate_size=self.inner)
        copies = self.setting.copies(3 * self.width * self.inner * SIZE)
        with self.setting.device:
            found = nn.ModuleList(DrafterMLP(sizes) for _ in range(copies))
        found = found.to(DTYPE).requires_grad_(False)
        use_skinny(found)
        return found

    def calls(self, tokens: int) -> list[Call]:
        x = self.setting.random(tokens, self.width)
        return [partial(module, x) for module in self.modules]


class Elementwise(Layer):
    """A function of activations, which lie in the L2 as in a step.

    On a card Inductor makes one kernel of it, by itself; in the engine it may join neighbours.

    Args:
        function: of tensors that have a row for each token.
        widths: of these tensors; outputs: numbers written for a token.
    """

    is_compiled = True

    def __init__(
        self,
        setting: Setting,
        name: str,
        owner: Owner,
        per_step: int,
        function: Callable[..., Any],
        widths: tuple[int, ...],
        outputs: int,
    ) -> None:
        super().__init__(setting, name, owner, per_step)
        self.function, self.widths, self.outputs = function, widths, outputs

    def work(self, tokens: int) -> Work:
        return Work(tokens * (sum(self.widths) + self.outputs) * SIZE, 0)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        on_card = self.setting.device.type == "cuda"
        return torch.compile(self.function, dynamic=True) if on_card else self.function

    def calls(self, tokens: int) -> list[Call]:
        return [partial(self.compiled, *(self.setting.random(tokens, w) for w in self.widths))]


class Attention(Layer):
    """Attention of decode steps over a paged bfloat16 cache, which it writes itself."""

    def __init__(
        self, setting: Setting, owner: Owner, per_step: int, heads: int, kv_heads: int, dim: int
    ) -> None:
        super().__init__(setting, "attention", owner, per_step)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim

    def work(self, tokens: int) -> Work:
        sequences, queries = self.setting.sequences(tokens)
        position = self.kv_heads * self.dim * 2 * SIZE  # its key and value
        cache = sequences * (self.setting.context - queries) * position
        rows = sequences * queries
        moved = cache + rows * (2 * self.heads * self.dim * SIZE + 2 * position)
        seen = self.setting.context - (queries - 1) / 2
        return Work(moved, 4 * rows * self.heads * self.dim * seen)

    def calls(self, tokens: int) -> list[Call]:
        setting, device = self.setting, self.setting.device
        sequences, queries = setting.sequences(tokens)
        rows, blocks_each = sequences * queries, -(-setting.context // CACHE_BLOCK)
        shape = (sequences * blocks_each, CACHE_BLOCK, self.kv_heads, self.dim)
        position = torch.arange(setting.context - queries, setting.context, device=device)
        tables = torch.randperm(shape[0], device=device).view(sequences, blocks_each)
        slots = tables[:, position // CACHE_BLOCK] * CACHE_BLOCK + position % CACHE_BLOCK
        query, key, value = (
            setting.random(rows, heads, self.dim)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        sizes = AttentionShape(
            sequences, rows, queries, self.heads, self.kv_heads, self.dim, DTYPE, DTYPE
        )
        config = choose_config(sizes, DeviceLimits.of(device))
        start = torch.arange(sequences + 1, device=device) * queries
        lens = torch.full((sequences,), setting.context, device=device)

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            return paged_attention(
                *(query, keys, values, start, lens, tables),
                max_query_len=queries,
                scaling=self.dim**-0.5,
                config=config,
                workspace=workspace,
                new=NewKeyValues(key, value, slots.view(-1)),
            )

        workspace = Workspace.make(sizes, config, device)
        cache_bytes = 2 * SIZE * shape[0] * CACHE_BLOCK * self.kv_heads * self.dim
        return [
            partial(attend, setting.random(*shape), setting.random(*shape))
            for _ in range(setting.copies(cache_bytes))
        ]


class Router(Layer):
    """The router: logits, the experts of each token and their weights, in Triton."""

    def __init__(self, setting: Setting, per_step: int, experts: int, chosen: int, width: int):
        super().__init__(setting, "router", "target", per_step)
        self.experts, self.chosen, self.width = experts, chosen, width

    def work(self, tokens: int) -> Work:
        logits = tokens * self.experts
        moved = (self.experts + tokens) * self.width * SIZE + logits * SIZE
        return Work(moved + tokens * self.chosen * (SIZE + 4), 2 * logits * self.width)

    def calls(self, tokens: int) -> list[Call]:
        x = self.setting.random(tokens, self.width)
        return [
            partial(
                route,
                x,
                self.setting.random(self.experts, self.width) * self.width**-0.5,
                None,
                self.chosen,
                among_chosen=True,
            )
            for _ in range(self.setting.copies(self.experts * self.width * SIZE))
        ]


class ExpertProblem:
    """The weights of one layer's experts, and even routings that differ from call to call."""

    def __init__(self, setting: Setting, experts: int, chosen: int, width: int, inner: int) -> None:
        self.setting, self.experts, self.chosen = setting, experts, chosen
        self.width, self.inner = width, inner
        self._routings: dict[int, list[Tensor]] = {}

    def num_touched(self, tokens: int) -> float:
        """Return the distinct experts of a call, on average over the routings."""
        return mean(float(len(index.unique())) for index in self.routings(tokens))

    def routings(self, tokens: int) -> list[Tensor]:
        """Return the experts of each token, int32 [T, C], of every call."""
        if tokens not in self._routings:
            generator = torch.Generator().manual_seed(tokens)
            self._routings[tokens] = [
                torch.rand(tokens, self.experts, generator=generator)
                .topk(self.chosen)
                .indices.int()
                .to(self.setting.device)
                for _ in range(ROUTINGS if self.setting.rotated_bytes else 1)
            ]
        return self._routings[tokens]

    @cached_property
    def gate_up(self) -> Fp8Weight:
        size = (self.experts, 2 * self.inner, self.width)
        return Fp8Weight(*random_fp8(size, self.setting.device))

    @cached_property
    def down(self) -> Fp8Weight:
        return Fp8Weight(*random_fp8((self.experts, self.width, self.inner), self.setting.device))

    @cached_property
    def packed(self) -> ExpertWeights:
        up, down = (make_fp8(w.q, w.scale, (BLOCK, BLOCK)) for w in (self.gate_up, self.down))
        return ExpertWeights(up, down, Gate("silu"))

    def config(self, x: Tensor, assignments: int, weight: Any) -> grouped.GroupedConfig:
        """Return the engine's choice."""
        registers = grouped.can_use_registers(x, weight)
        return grouped.choose_config(assignments, self.experts, weight, registers=registers)

    def plan(self, index_TC: Tensor, block_m: int) -> Tensor:
        return grouped.plan_tiles(index_TC.view(-1), self.experts, block_m)


class ExpertProduct(Layer):
    """One of the two products of experts, as `run_experts` calls it."""

    is_fp8 = True

    def __init__(self, problem: ExpertProblem, per_step: int, *, is_up: bool) -> None:
        name = "experts gate-up" if is_up else "experts down"
        super().__init__(problem.setting, name, "target", per_step)
        self.problem, self.is_up = problem, is_up
        self.k = problem.width if is_up else problem.inner
        self.n = 2 * problem.inner if is_up else problem.width
        self.outputs = problem.inner if is_up else problem.width
        self.shared_by = problem.chosen if is_up else 1  # assignments that share a row of x
        self.gate = Gate("silu") if is_up else None

    def work(self, tokens: int) -> Work:
        return self.work_of(tokens, self.problem.num_touched(tokens))

    def work_of(self, tokens: int, touched: float) -> Work:
        """Return the work where tokens touch so many experts."""
        assignments = tokens * self.problem.chosen
        rows = assignments // self.shared_by
        moved = touched * fp8_bytes(self.n, self.k)
        moved += (rows * self.k + assignments * self.outputs) * SIZE
        return Work(moved, 2 * assignments * self.n * self.k)

    @property
    def weight(self) -> Fp8Weight:
        return self.problem.gate_up if self.is_up else self.problem.down

    def rows(self, tokens: int) -> Tensor:
        return self.setting.random(tokens * self.problem.chosen // self.shared_by, self.k)

    @property
    def packed(self) -> PackedWeight:
        return self.problem.packed.gate_up if self.is_up else self.problem.packed.down

    def calls(self, tokens: int) -> list[Call]:
        x, packed = self.rows(tokens), self.packed
        config = self.problem.config(x, tokens * self.problem.chosen, packed)
        return [
            partial(
                grouped.grouped_product,
                x,
                packed,
                None,
                self.gate,
                index_S=index.view(-1),
                plan=self.problem.plan(index, config.block_m) if tokens > 1 else None,
                chosen=self.shared_by,
                config=config,
            )
            for index in self.problem.routings(tokens)
        ]

    def candidates(self, tokens: int) -> tuple[list[Candidate], dict[str, str]]:
        x = self.rows(tokens)
        reasons = {"scaled_grouped_mm": "has scales of rows and MX formats, none of 128 x 128"}
        reason = misfit(self.n, self.k, self.outputs)
        if not (reason or grouped.can_use_registers(x, self.packed)):
            reason = "needs a card of compute capability 9.0"
        if reason:
            return [], reasons | {"gluon": reason}
        rows, routings = quantise(x, is_tiled=True), self.problem.routings(tokens)
        config = grouped.choose_fp8_config(routings[0].numel(), self.packed.num_experts)
        expected = cache(
            partial(
                *(reference, rows, self.weight, routings[0].view(-1)),
                has_gate=self.is_up,
                chosen=self.shared_by,
            )
        )
        calls: list[Call] = [
            partial(
                *(grouped.grouped_product, rows, self.packed, None, self.gate),
                index_S=index.view(-1),
                plan=self.problem.plan(index, config.block_m),
                chosen=self.shared_by,
                config=config,
            )
            for index in routings
        ]
        return [quantising(x), Candidate("gluon", calls, expected)], reasons


class ExpertPlan(Layer):
    """The order of the assignments and their tiles, for both products. One token needs none."""

    def __init__(self, problem: ExpertProblem, per_step: int) -> None:
        super().__init__(problem.setting, "experts plan", "target", per_step)
        self.problem = problem

    def work(self, tokens: int) -> Work:
        return Work(2 * 4 * tokens * self.problem.chosen if tokens > 1 else 0, 0)

    def calls(self, tokens: int) -> list[Call]:
        problem, assignments = self.problem, tokens * self.problem.chosen
        sizes = {
            problem.config(self.setting.random(assignments, w.num_inputs), assignments, w).block_m
            for w in (problem.packed.gate_up, problem.packed.down)
        }

        def plan(index: Tensor) -> None:
            for block_m in sizes:
                problem.plan(index, block_m)

        return [partial(plan, index) for index in problem.routings(tokens)] if tokens > 1 else []


class ExpertSum(Layer):
    """The weighted sum of the outputs of a token's experts, which lie in the L2 as in a step."""

    def __init__(self, problem: ExpertProblem, per_step: int) -> None:
        super().__init__(problem.setting, "experts sum", "target", per_step)
        self.problem = problem

    def work(self, tokens: int) -> Work:
        rows = tokens * (self.problem.chosen + 1)
        return Work((rows * self.problem.width + tokens * self.problem.chosen) * SIZE, 0)

    def calls(self, tokens: int) -> list[Call]:
        y = self.setting.random(tokens * self.problem.chosen, self.problem.width)
        weight = self.setting.random(tokens, self.problem.chosen)
        return [partial(grouped.weighted_sum, y, weight)]


class WholeExperts(Layer):
    """All of the experts by `run_experts`, to compare with the sum of its parts, and with FP8
    activations, quantising included.
    """

    is_fp8 = True

    def __init__(self, problem: ExpertProblem, products: list[ExpertProduct]) -> None:
        super().__init__(problem.setting, "experts whole", "target", 0)
        self.problem, self.products = problem, products

    def work(self, tokens: int) -> Work:
        works = [one.work(tokens) for one in self.products]
        return Work(sum(w.bytes for w in works), sum(w.flops for w in works))

    def calls(self, tokens: int) -> list[Call]:
        problem = self.problem
        x, weight = self.inputs(tokens)
        assert not grouped.uses_library(x, problem.packed.gate_up, weight.numel()), (
            "so many tokens are not multiplied by the products that are timed"
        )
        return self.calls_with(x, weight, problem.packed)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return states of tokens, and the weights of their experts."""
        weight = torch.softmax(self.setting.random(tokens, self.problem.chosen), -1)
        return self.setting.random(tokens, self.problem.width), weight

    def calls_with(self, x: Tensor, weight: Tensor, experts: ExpertWeights) -> list[Call]:
        routings = self.problem.routings(len(x))
        return [partial(grouped.run_experts, x, index, weight, experts) for index in routings]

    def candidates(self, tokens: int) -> tuple[list[Candidate], dict[str, str]]:
        packed, name = self.problem.packed, "FP8 activations"
        if not (fits_fp8(packed.gate_up) and fits_fp8(packed.down)):
            return [], {name: f"{BLOCK} divides not all sizes"}
        experts = replace(packed, fp8_activations=True)
        x, weight = self.inputs(tokens)
        if not grouped.uses_fp8(x, experts, weight.numel()):
            return [], {name: "too few tokens"}
        index = self.problem.routings(tokens)[0]
        expected = partial(grouped.run_experts_reference, x.float(), index, weight.float(), packed)
        return [Candidate(name, self.calls_with(x, weight, experts), expected, 2**-3)], {}


def add_and_norm(hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of both, and its RMSNorm."""
    hidden = hidden + residual
    return hidden, _norm(hidden)


def norm_and_turn(heads: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the RMSNorm of each query and key head, in RoPE's place."""
    both = qkv.unflatten(-1, (-1, cos.shape[-1]))[:, :heads]
    return _turn(_norm(both), cos, sin)


def turn(heads: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the query and key heads in RoPE's place."""
    return _turn(qkv.unflatten(-1, (-1, cos.shape[-1]))[:, :heads], cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def layers_of(shape: Shape, setting: Setting) -> list[Layer]:
    """Return the layers of a target and of its P-EAGLE head, in the order of a step.

    The head's pass is taken to have a slot for each token of the target's.
    """
    return [*_target_layers(shape, setting), *_head_layers(shape, setting)]


def _target_layers(shape: Shape, setting: Setting) -> list[Layer]:
    config = make_config(shape)
    num, width, dim = config.num_hidden_layers, config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    qkv, turned = (heads + 2 * kv_heads) * dim, heads + kv_heads
    widths = (qkv, dim, dim)
    turns = partial(norm_and_turn, turned)
    found: list[Layer] = [
        Elementwise(
            setting, "add, norm", "target", 2 * num + 1, add_and_norm, (width, width), 2 * width
        ),
        Fp8Linear(setting, "q/k/v", "target", num, qkv, width),
        Elementwise(setting, "q/k norm, RoPE", "target", num, turns, widths, turned * dim),
        Attention(setting, "target", num, heads, kv_heads, dim),
        Fp8Linear(setting, "o", "target", num, width, heads * dim),
    ]
    if "num_experts" in shape.config:
        experts, chosen = config.num_experts, config.num_experts_per_tok
        problem = ExpertProblem(setting, experts, chosen, width, config.moe_intermediate_size)
        products = [ExpertProduct(problem, num, is_up=is_up) for is_up in (True, False)]
        found += [
            Router(setting, num, experts, chosen, width),
            ExpertPlan(problem, num),
            *products,
            ExpertSum(problem, num),
            WholeExperts(problem, products),
        ]
    else:
        inner = config.intermediate_size
        found += [
            Fp8Linear(setting, "gate-up", "target", num, 2 * inner, width),
            Elementwise(setting, "SwiGLU", "target", num, swiglu, (2 * inner,), inner),
            Fp8Linear(setting, "down", "target", num, width, inner),
        ]
    return [*found, Linear(setting, "lm_head", "target", 1, config.vocab_size, width)]


def _head_layers(shape: Shape, setting: Setting) -> list[Layer]:
    head = make_head_config(shape, "peagle")
    num, width, dim = head.num_layers, head.hidden_size, head.head_dim
    heads, kv_heads = head.num_attention_heads, head.num_kv_heads
    qkv, turned = (heads + 2 * kv_heads) * dim, heads + kv_heads
    turns, widths = partial(turn, turned), (qkv, dim, dim)
    return [
        Linear(setting, "fc", "head", 1, width, head.feature_size),
        Elementwise(
            setting, "add, norm", "head", 2 * num + 2, add_and_norm, (width, width), 2 * width
        ),
        Linear(setting, "q/k/v of the first", "head", 1, qkv, 2 * width),
        *([Linear(setting, "q/k/v", "head", num - 1, qkv, width)] if num > 1 else []),
        Elementwise(setting, "RoPE", "head", num, turns, widths, turned * dim),
        Attention(setting, "head", num, heads, kv_heads, dim),
        Linear(setting, "o", "head", num, width, heads * dim),
        HeadMLP(setting, num, width, head.intermediate_size),
        Linear(setting, "lm_head", "head", 1, head.draft_vocab_size, width),
    ]
