"""Train a small target over flat code tokens, from scratch: the bundled Llama, or another model.

    python recipes/bundled_pair/pretrain.py --data build/pair --minutes 8
    torchrun --nproc-per-node 4 recipes/bundled_pair/pretrain.py --data build/pair --minutes 8

Reads `train.u16[.xz]`, `val.u16[.xz]` and `tokenizer/` under `--data`; writes `target/` (a Hugging
Face folder, bfloat16 safetensors) and `target_train.json` under `--out`. Several processes share
every batch and step alike. `--config` names the model's configuration; a mixture of experts has a
loss that spreads tokens over its experts, with the weight `router_aux_loss_coef`.

Shapes: B sequences of T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from peagle.environment import environment
from peagle.models.packed_layers import experts_of
from peagle.training.distributed import ONE_PROCESS, Processes, joined_processes
from peagle.training.optimizers import Muon

HERE = Path(__file__).parent
CALIBRATION_STEPS = (40, 100)  # step time is measured between these two, past compilation


@dataclass(frozen=True)
class TrainConfig:
    """What one run does; `minutes` replaces `steps` when given."""

    steps: int
    minutes: float | None
    batch: int  # sequences a step, of all processes together
    seq_len: int
    optimizer: str  # hidden matrices: "muon" or "adamw"; all else is AdamW
    lr: float
    warmup: int
    decay_share: float  # last share of the steps, lr falls linearly to 0
    weight_decay: float
    clip: float
    z_loss: float
    seed: int


def load_tokens(folder: Path, name: str, device: torch.device) -> torch.Tensor:
    """Flat tokens of `<name>.u16` or `<name>.u16.xz` as int16 (ids stay below 32768)."""
    raw, packed = folder / f"{name}.u16", folder / f"{name}.u16.xz"
    if raw.exists():
        flat = np.fromfile(raw, dtype="<u2")
    elif packed.exists():
        flat = np.frombuffer(lzma.decompress(packed.read_bytes()), dtype="<u2")
    else:
        raise FileNotFoundError(
            f"no {raw.name} or {packed.name} in {folder}; make them with the data recipe first"
        )
    return torch.from_numpy(flat.astype(np.int16)).to(device)


def build_model(config_path: Path, seed: int) -> PreTrainedModel:
    """The unmodified Hugging Face module with float32 weights."""
    torch.manual_seed(seed)
    values = json.loads(config_path.read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    if experts_of(model):
        model.set_experts_implementation("eager")  # runs in any type, under autocast too
    # Residual writes shrink with depth (GPT-2), so that a deep stack starts near the identity.
    scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
                parameter.mul_(scale)
    return model


def build_optimizers(model: PreTrainedModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Weight decay on matrices only; the tied embedding and stacked experts are always AdamW's."""
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [model.model.embed_tokens.weight]
    matrices += [p for p in model.model.layers.parameters() if p.ndim > 2]
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        optimizers.append(Muon(hidden, lr=config.lr, weight_decay=config.weight_decay))
    else:
        matrices += hidden
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True))
    return optimizers


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Warm-up, plateau, then linear to 0 at `steps`."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    decay = min(1.0, (steps - step) / max(1.0, config.decay_share * steps))
    return config.lr * min(warm, decay)


def token_losses(
    hidden_BTD: torch.Tensor, embedding_VD: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean cross-entropy, mean squared log-partition) of tied logits, in float32."""
    logits = F.linear(hidden_BTD, embedding_VD).flatten(0, 1).float()
    partition = logits.logsumexp(-1)
    picked = logits.gather(1, labels_BT.flatten()[:, None]).squeeze(1)
    return (partition - picked).mean(), partition.square().mean()


class Trainer:
    """Holds model, optimizers and tokens of one run; `run` trains, `evaluate` measures."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        data: Path,
        started: float,
        processes: Processes = ONE_PROCESS,
    ):
        self.device = processes.device("auto")
        self.config, self.started, self.processes = config, started, processes
        self.model = model.to(self.device)
        self.train_tokens = load_tokens(data, "train", self.device)
        self.val_tokens = load_tokens(data, "val", self.device)
        self.check_data()
        self.optimizers = build_optimizers(model, config)
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.losses = token_losses
        self.is_mixture = bool(experts_of(model))
        # A loop over experts does not trace whole.
        if self.device.type == "cuda" and not self.is_mixture:
            # One decoder layer compiles once and serves all: seconds where the whole model takes
            # a minute or more.
            for layer in model.model.layers:
                layer.compile(fullgraph=True)
            self.losses = torch.compile(token_losses, fullgraph=True)

    def check_data(self) -> None:
        vocab, count = self.model.config.vocab_size, self.processes.world_size
        if self.config.batch % count:
            raise ValueError(
                f"--batch is {self.config.batch}, expected a multiple of the {count} processes"
            )
        for name, tokens in (("train", self.train_tokens), ("val", self.val_tokens)):
            if len(tokens) <= self.config.seq_len:
                raise ValueError(
                    f"{name} holds {len(tokens)} tokens, expected more than one sequence of "
                    f"{self.config.seq_len}; add data or lower --seq-len"
                )
            if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
                raise ValueError(
                    f"{name} holds token ids outside 0..{vocab - 1}; "
                    "the tokens and the config's vocab_size belong to different tokenizers"
                )

    def batch(self) -> torch.Tensor:
        """[B, T + 1] tokens at uniformly random offsets; documents may be cut.

        All processes draw the whole batch, and each takes its share.
        """
        last = len(self.train_tokens) - self.config.seq_len
        start = torch.randint(
            last, (self.config.batch, 1), generator=self.generator, device=self.device
        )
        start = start[self.processes.rank :: self.processes.world_size]
        index = start + torch.arange(self.config.seq_len + 1, device=self.device)
        return self.train_tokens[index].long()

    def forward(self, model: PreTrainedModel, tokens: torch.Tensor, exact: bool = False):
        """[B, T + 1] tokens → (cross-entropy, regularisation), means over B·T positions.

        The second is z_loss times the squared log-partition and, of a mixture, the weighted loss
        that spreads tokens over experts. `exact` is float32 and eager, else the GPU computes in
        bfloat16 and compiled.
        """
        losses = token_losses if exact else self.losses
        autocast = self.device.type == "cuda" and not exact
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            options = {"output_router_logits": True} if self.is_mixture else {}
            output = model.model(input_ids=tokens[:, :-1], use_cache=False, **options)
            embedding_VD = model.model.embed_tokens.weight
            loss, partition = losses(output.last_hidden_state, embedding_VD, tokens[:, 1:])
            return loss, self.config.z_loss * partition + self.balance(model, output)

    def balance(self, model: PreTrainedModel, output) -> torch.Tensor | float:
        """The weighted load-balancing loss of a mixture (Fedus et al., 2021); 0 of other models."""
        if not self.is_mixture:
            return 0.0
        config = model.config
        return config.router_aux_loss_coef * load_balancing_loss_func(
            output.router_logits, config.num_experts, config.num_experts_per_tok
        )

    def step(self, lr: float) -> torch.Tensor:
        loss, regularisation = self.forward(self.model, self.batch())
        (loss + regularisation).backward()
        self.average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def average_gradients(self) -> None:
        """The gradient of the whole batch: the mean over shares of equal size.

        It is the same in all processes to the last bit, and so are the weights that follow.
        """
        if self.processes.world_size == 1:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        self.processes.sum(flat).div_(self.processes.world_size)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

    def say(self, message: str) -> None:
        if self.processes.is_first:
            print(message, flush=True)

    def seconds(self) -> float:
        """Since the start of the process's work, with the device idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self.started

    def run(self) -> dict:
        """Train; returns steps, tokens and the mean loss of the last tenth (at most 200 steps)."""
        config = self.config
        steps = config.steps if config.minutes is None else 10**9
        first, last = CALIBRATION_STEPS
        losses: list[torch.Tensor] = []
        mark = (0, self.seconds())
        step = 0
        while step < steps:
            losses.append(self.step(learning_rate(step, steps, config)))
            step += 1
            if config.minutes is not None and step == first:
                calibration = self.seconds()
            if config.minutes is not None and step == last:
                step_time = (self.seconds() - calibration) / (last - first)
                # 1.5% and 12 s cover drift, the final validation and saving.
                left = 0.985 * (config.minutes * 60 - self.seconds() - 12)
                # The least of all processes.
                steps = -self.processes.most(-(step + max(1, int(left / step_time))))
                self.say(f"{step_time * 1e3:.2f} ms a step: {steps} steps in all")
            if step % max(1, min(200, steps // 10)) == 0 or step == steps:
                mark = self.report(step, steps, losses[-1], mark)
            if step % 4000 == 0:
                self.say(f"step {step} validation {self.evaluate(self.model):.4f}")
        tail = torch.stack(losses[-max(1, min(200, steps // 10)) :]).mean()
        self.processes.sum(tail)
        return {
            "steps": steps,
            "tokens": steps * config.batch * config.seq_len,
            "train_loss": round(tail.item() / self.processes.world_size, 4),
        }

    def report(self, step: int, steps: int, loss: torch.Tensor, mark: tuple) -> tuple:
        now = self.seconds()
        per_step = (now - mark[1]) / (step - mark[0])
        rate = self.config.batch * self.config.seq_len / per_step
        lr = learning_rate(step - 1, steps, self.config)
        self.say(
            f"step {step}/{steps} loss {loss.item():.4f} lr {lr:.2e} "
            f"{rate / 1e3:.1f}k tokens/s ETA {(steps - step) * per_step:.0f} s"
        )
        return step, now

    def evaluate(self, model: PreTrainedModel, exact: bool = False) -> float:
        """Mean cross-entropy of validation windows of T; an incomplete last batch is left out.

        Only the exact pass turns gradients off: for the other, that would compile a second graph.
        """
        size = self.config.seq_len
        count = (len(self.val_tokens) - 1) // size
        # In float32 no fused kernel takes grouped heads: the scores of a batch are held in full.
        batch = min(8 if exact else self.config.batch, count)
        starts = torch.arange(count, device=self.device)[:, None] * size
        index = starts + torch.arange(size + 1, device=self.device)
        losses = []
        for first in range(0, count - batch + 1, batch):
            tokens = self.val_tokens[index[first : first + batch]].long()
            with torch.set_grad_enabled(not exact):
                losses.append(self.forward(model, tokens, exact)[0].detach())
        return torch.stack(losses).mean().item()


def save(model: PreTrainedModel, data: Path, folder: Path) -> str:
    """Write the bfloat16 folder with its tokenizer; returns the sha256 of the weights' file."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in sorted((data / "tokenizer").glob("*")):
        shutil.copy(file, folder / file.name)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def provenance() -> dict:
    facts = environment(torch.device("cuda") if torch.cuda.is_available() else None)
    on_gpu = facts["device"] != "cpu"
    return {
        "hardware": facts["device"] if on_gpu else facts["cpu"],
        "versions": {name: facts[name] for name in ("python", "torch", "transformers")},
        "command": " ".join(["python", "recipes/bundled_pair/pretrain.py", *sys.argv[1:]]),
        "commit": facts["commit"],
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "target.json")
    parser.add_argument("--data", type=Path, default=Path("build/pair"))
    parser.add_argument("--out", type=Path, default=Path("build/pair"))
    parser.add_argument("--steps", type=int, default=6842)
    parser.add_argument("--minutes", type=float, help="budget of the whole run; replaces --steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--decay-share", type=float, default=0.7)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--z-loss", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    started = time.perf_counter()
    args = vars(parse_args())
    config_path, data, out = (args.pop(name) for name in ("config", "data", "out"))
    config = TrainConfig(**args)
    with joined_processes() as processes:
        model = build_model(config_path, config.seed)
        trainer = Trainer(model, config, data, started, processes)
        parameters = sum(p.numel() for p in model.parameters())
        trainer.say(f"{parameters / 1e6:.2f}M parameters, {config}")
        summary = trainer.run()
        summary |= {"parameters": parameters, "processes": processes.world_size}
        processes.first(lambda: finish(trainer, summary, data, out))


def finish(trainer: Trainer, summary: dict, data: Path, out: Path) -> None:
    """Save the target, validate what was saved and write down how it was made."""
    trained_seconds = trainer.seconds()
    digest = save(trainer.model, data, out / "target")
    # The rounded weights, in float32 as the CPU serves them.
    saved = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    saved = saved.to(trainer.device)
    summary |= {
        "val_loss": round(trainer.evaluate(saved.eval(), exact=True), 4),
        "train_tokens": len(trainer.train_tokens),
        "tokens_per_second": round(summary["tokens"] / trained_seconds),
        "seconds": round(trainer.seconds(), 1),
        "sha256": digest,
        "settings": asdict(trainer.config),
        **provenance(),
    }
    (out / "target_train.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
