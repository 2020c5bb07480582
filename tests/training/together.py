"""What the processes of tests/training/test_distributed.py do; imported by each of them."""

import itertools
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from peagle.data.batches import Batch, BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.data.features import TargetStates
from peagle.models.checkpoint.packed import Rounding
from peagle.models.drafter import Drafter
from peagle.models.head_quantization import HeadQuantization
from peagle.training import state
from peagle.training.config import MethodSection, TrainConfig
from peagle.training.distributed import ONE_PROCESS, Processes
from peagle.training.optimizers import ShardedMasters, build_masters
from peagle.training.step import Objective, TrainingStep
from peagle.training.step_memory import Budget, choose_memory
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.training_methods import TrainingMethod
from tests.training.reference import HIDDEN, VOCAB, make_head, peagle_forward
from tests.training.step_runs import Case

SECTION = MethodSection(depth=5, depth_decay=0.9, cod_ratio=0.8, cod_floor=0.3)  # type: ignore[call-arg]


# ---- one step of a head in float64 ----


def make_odd_head(**options: Any) -> Drafter:
    """A head with nothing that two processes can halve."""
    sizes = {"hidden_size": 15, "intermediate_size": 21, "num_attention_heads": 3}
    return make_head(**{**sizes, "num_kv_heads": 1, "head_dim": 6, **options})


def make_stream(processes: Processes) -> BatchStream:
    """Packed rows of ragged documents, four rows a batch."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 36, (40,), generator=generator)
    prompts = (torch.rand(40, generator=generator) * (lengths - 3)).long() + 1
    tokens = torch.randint(2, VOCAB, (int(lengths.sum()),), generator=generator)
    dataset = ResponseDataset.of_prompts(tokens.int(), F.pad(lengths.cumsum(0), (1, 0)), prompts)
    rank, count = processes.rank, processes.world_size
    return BatchStream(dataset, 4 * 36, 4, seed=3, rank=rank, world_size=count)


def make_states(batch: Batch) -> TargetStates:
    """Made for the whole batch, so that rows do not depend on who has them."""
    generator = torch.Generator().manual_seed(8)
    shape = (batch.num_rows, batch.tokens_BN.shape[1], 3 * HIDDEN)
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    own = features[batch.first_row : batch.first_row + len(batch.tokens_BN)]
    return TargetStates(own, own[..., :HIDDEN])


def target_matrix() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)


def make_step(head: Drafter, segments: int, processes: Processes) -> TrainingStep:
    matrix = target_matrix()
    target = cast(Any, SimpleNamespace(compute_logits=lambda hidden: hidden @ matrix.mT))
    objective = Objective(head, target, SECTION, 16)
    return TrainingStep(head, TrainingMethod(SECTION), objective, objective, segments, processes)


def in_one_pass(head: Drafter) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch, as the method is written down."""
    batch = make_stream(ONE_PROCESS).at(1)
    states = make_states(batch)
    elements = TrainingMethod(SECTION).elements(batch, torch.Generator().manual_seed(6))
    hidden = peagle_forward(head, batch, states, elements)
    row, column = elements.supervised.nonzero(as_tuple=True)
    anchor, depth = elements.anchors[row, column], elements.depths[row, column]
    log_q = head.compute_logits(hidden[row, column]).log_softmax(-1)
    log_p = (states.hidden_BNH[row, anchor + depth + 1] @ target_matrix().mT).log_softmax(-1)
    weights = 0.9 ** depth.double()
    losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    gradients = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    return float(loss.detach()), gradients


def gradient_errors(
    processes: Processes, heads: list[dict[str, Any]], segments: list[int]
) -> list[float]:
    """Largest differences of loss and gradients from those of one pass in one process."""
    errors = []
    for options in heads:
        head = make_odd_head(**{k: v for k, v in options.items() if k != "frozen"})
        head.embed_tokens.requires_grad_(not options.get("frozen"))
        loss, expected = in_one_pass(head)
        assert all(gradient.abs().max() > 1e-4 for gradient in expected.values())
        masters = ShardedMasters(head, torch.float64, processes)
        for count in segments:
            batch = make_stream(processes).at(1)
            step = make_step(head, count, processes)
            outcome = step.backward(batch, make_states(batch), torch.Generator().manual_seed(6))
            masters.collect()
            found = {name: cast(DTensor, p.grad).full_tensor() for name, p in masters.named()}
            assert found.keys() == expected.keys()
            worst = max(float((found[name] - expected[name]).abs().max()) for name in found)
            errors += [worst, abs(float(outcome.loss) - loss)]
            masters.publish()
    return errors


def collectives_of_a_step(
    processes: Processes, segments: list[int]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """How often each collective is called by the passes of so many segments, and after them."""
    counts = []
    head = make_odd_head()
    masters = build_masters(head, torch.float64, processes)
    batch = make_stream(processes).at(1)
    for number in segments:
        step = make_step(head, number, processes)
        with _Collectives() as within:
            step.backward(batch, make_states(batch), torch.Generator().manual_seed(6))
        with _Collectives() as after:
            masters.clip(masters.collect(), 1.0)
            masters.publish()
        counts.append((dict(within.calls), dict(after.calls)))
    return counts


class _Collectives(TorchDispatchMode):
    """Counts those called meanwhile, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def segments_chosen(processes: Processes, sizes: list[int]) -> int:
    """S of a step for which each process has another budget."""
    budget = Budget(sizes[processes.rank], "so much", True)
    case = Case(rows=4, length=512, method={"depth": 8})
    return choose_memory(case.shape, case.config.run, budget, processes=processes).segments


# ---- whole runs ----


def train(
    processes: Processes,
    config: TrainConfig,
    *,
    resume: bool = False,
    stop_at: int = 0,
) -> dict[str, Any]:
    """A run; the last process alone asks for a stop. Returns its reports and last weights."""
    trainer = Trainer(config, processes=processes)
    last, real = processes.rank == processes.world_size - 1, trainer._train_step

    def step(batch: Batch, states: TargetStates, rate: float) -> Any:
        trainer.stop_requested = last and trainer.step + 1 == stop_at
        return real(batch, states, rate)

    trainer._train_step = step
    try:
        trainer.run(resume=resume)
    except TrainingStopped as stopped:
        assert f"step {stop_at} " in str(stopped)
    weights = {name: p.detach().cpu().clone() for name, p in trainer.trained.named_parameters()}
    return {"entries": trainer.history.entries, "weights": weights, "tokens": trainer.num_tokens}


def train_all(processes: Processes, configs: list[TrainConfig]) -> list[dict[str, Any]]:
    return [train(processes, config) for config in configs]


def resume_all(
    processes: Processes, whole: TrainConfig, stopped: list[TrainConfig], stop_at: int
) -> list[dict[str, Any]]:
    """An uninterrupted run; others are stopped, the first of them is resumed."""
    first = train(processes, whole)
    for config in stopped:
        train(processes, config, stop_at=stop_at)
    return [first, train(processes, stopped[0], resume=True)]


def resume(processes: Processes, config: TrainConfig) -> dict[str, Any]:
    return train(processes, config, resume=True)


def plan_by_time(processes: Processes, config: TrainConfig) -> int:
    """The planned steps, where a step takes 1 s in the first process and 1.5 s in the second."""
    times = itertools.count(0.0, 1.0 + processes.rank / 2)
    record = Trainer(config, processes=processes, clock=lambda: next(times)).run()
    return record["planned_steps"]


# ---- accidents ----


def die_in_a_step(processes: Processes, config: TrainConfig, at: int) -> None:
    """The second process is killed while the others train."""
    trainer = Trainer(config, processes=processes)
    real = trainer._train_step

    def step(batch: Batch, states: TargetStates, rate: float) -> Any:
        if processes.rank == 1 and trainer.step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(batch, states, rate)

    trainer._train_step = step
    trainer.run()


def hang_in_a_step(processes: Processes, config: TrainConfig) -> None:
    """The second process goes on living, but not training."""
    trainer = Trainer(config, processes=processes)
    if processes.rank == 1:
        time.sleep(4)
    trainer.run()


def fail_in_a_save(processes: Processes, config: TrainConfig, at: int, how: str) -> None:
    """In save number `at` the second process is killed, or finds its disk full, half way."""
    saves = []

    class Writer(state.HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            saves.append(plan)
            if len(saves) == at and processes.rank == 1:
                (Path(self.path) / "shard-00002-half.safetensors").write_bytes(b"half a file")
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    state.HuggingFaceStorageWriter = Writer  # type: ignore[misc]
    Trainer(config, processes=processes).run()


def command(_: None, arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and standard error of the command line."""
    from peagle.cli.main import run

    (folder / "stderr").mkdir(exist_ok=True)
    with (folder / "stderr" / os.environ["RANK"]).open("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            status = run(arguments)
        except SystemExit as left:
            status = int(str(left.code))
        file.seek(0)
        return status, file.read()


def step_by_ones(
    head: torch.nn.Module, masters: ShardedMasters, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Take a step with gradients of 1; return the whole weights from before."""
    before = {n: cast(DTensor, p.detach()).full_tensor() for n, p in masters.named()}
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    masters.collect()
    optimizer.step()
    masters.publish()
    return before


def bfloat16_publishes_what_the_optimizer_moved(processes: Processes) -> list[str]:
    """Names of weights of a bfloat16 head that are not their float32 masters, rounded."""
    head = make_odd_head().float()
    masters = ShardedMasters(head, torch.bfloat16, processes)
    optimizer = torch.optim.SGD([p for _, p in masters.named()], lr=2e-4)
    before = step_by_ones(head, masters, optimizer)
    own = dict(head.named_parameters())
    return [
        name
        for name, master in masters.named()
        if not torch.equal(own[name], cast(DTensor, master.detach()).full_tensor().bfloat16())
        or not torch.allclose(
            before[name] - cast(DTensor, master.detach()).full_tensor(),
            torch.full_like(before[name], 2e-4 * processes.world_size),
            rtol=1e-2,
        )
    ]


def rounds_whole_float32_weights(processes: Processes) -> list[str]:
    """Names of weights of a bfloat16 head that are not their float32 masters, rounded to INT8."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 3,
        "num_kv_heads": 1,
    }
    head = make_head(**sizes, head_dim=16, target_hidden_size=16).float()
    rounding = Rounding(head.config, HeadQuantization("int8", (), 16))
    masters = ShardedMasters(head, torch.bfloat16, processes, rounding)
    optimizer = torch.optim.SGD([p for _, p in masters.named()], lr=2e-4)
    wrong = []
    for _ in range(2):
        before = step_by_ones(head, masters, optimizer)
        own = dict(head.named_parameters())
        for name, master in masters.named():
            whole = cast(DTensor, master.detach()).full_tensor()
            moved = before[name] - whole
            expected = whole
            if whole.dim() == 2 and name.startswith(("fc", "layers")):
                groups = whole.unflatten(1, (-1, 16))
                scale = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
                expected = ((groups / scale).round() * scale).flatten(1)
            is_moved = torch.allclose(moved, torch.full_like(moved, 4e-4), rtol=1e-2)
            if not is_moved or not torch.equal(own[name], expected.bfloat16()):
                wrong.append(name)
    return wrong
