"""Let the bundled target answer prompts: the text its heads are trained on.

    python recipes/bundled_pair/respond.py --data build/pair --show

Reads `target/` and `response_prompts.npz` (arrays [N, P] of prompts of equal length) under
`--data`; writes `responses.safetensors` and `responses_val.safetensors` (the last `--val` samples)
under `--out`: `tokens` int16 (prompt and response of every sample, end to end),
`sequence_start_loc` int64 [N + 1], `prompt_lens` int32 [N], `temperature` float32 [N].

Shapes: B sequences, H query heads, G key-value heads, D head width, S cache slots.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoTokenizer, LlamaForCausalLM

LOOP_NGRAM = 16
STOP_CHECK_STEPS = 16  # the host asks the device this rarely whether all sequences have stopped
PROBES = (
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
)


@dataclass
class StaticCache:
    """Keys and values of one layer, and what one decode step needs to know."""

    keys_BGSD: torch.Tensor
    values_BGSD: torch.Tensor
    position: torch.Tensor  # int64 [1], shared by all layers
    mask_S: torch.Tensor  # 0 up to `position`, -inf after it, shared by all layers


def static_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attention over `module.static_cache`; prompts (T > 1) start at slot 0.

    transformers' own static cache repeats keys and values for grouped heads at every step; here the
    heads of a group are rows of one product.
    """
    cache: StaticCache = module.static_cache
    batch, heads, length, width = query.shape
    if length > 1:
        cache.keys_BGSD[:, :, :length] = key
        cache.values_BGSD[:, :, :length] = value
        # The memory-efficient float32 kernel takes no grouped heads.
        key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    cache.keys_BGSD.index_copy_(2, cache.position, key)
    cache.values_BGSD.index_copy_(2, cache.position, value)
    grouped = query.reshape(batch, key.shape[1], -1, width)
    scores = grouped @ cache.keys_BGSD.mT * scaling + cache.mask_S
    out = scores.softmax(-1) @ cache.values_BGSD
    return out.reshape(batch, 1, heads, width), None


AttentionInterface.register("static_attention", static_attention)


def load_target(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """The target in the type it is served in (a CPU's is float32), with the static attention."""
    return (
        LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="static_attention"
        )
        .to(device)
        .eval()
    )


class StaticDecoder:
    """Continues batches of B prompts of P tokens by `max_new` tokens; on a GPU, one captured graph.

    Rows at temperature t choose argmax(logits + t·g) with Gumbel noise g, which is sampling from
    softmax(logits / t), and greedy choice at t = 0.
    """

    def __init__(self, model: LlamaForCausalLM, batch: int, prompt_len: int, max_new: int):
        self.model, self.batch, self.prompt_len, self.max_new = model, batch, prompt_len, max_new
        self.device, config = model.device, model.config
        like = {"device": model.device, "dtype": model.dtype}
        self.stop_id = config.eos_token_id
        slots = prompt_len + max_new
        if slots > config.max_position_embeddings:
            raise ValueError(
                f"prompts of {prompt_len} and {max_new} new tokens need {slots} positions, the "
                f"model has {config.max_position_embeddings}; lower --max-new"
            )
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.slots = torch.arange(slots, device=self.device)
        self.mask = torch.zeros(slots, **like)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.temperatures = torch.zeros(batch, device=self.device)
        self.output = torch.zeros(batch, slots, dtype=torch.long, device=self.device)
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        self.buffers = [
            (torch.zeros(shape, **like), torch.zeros(shape, **like))
            for _ in range(config.num_hidden_layers)
        ]
        self.graph = self.capture() if self.device.type == "cuda" else None

    def attach(self) -> None:
        """Hand this decoder's buffers to the model's layers."""
        for layer, (keys, values) in zip(self.model.model.layers, self.buffers, strict=True):
            layer.self_attn.static_cache = StaticCache(keys, values, self.position, self.mask)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.attach()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            self.step()  # handles and workspaces are made outside of the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.inference_mode():
            self.step()
        return graph

    def choose(self, hidden_BD: torch.Tensor) -> None:
        """Pick the next token of every row; rows that have stopped repeat the stop token."""
        logits = self.model.lm_head(hidden_BD).float()
        gumbel = -torch.empty_like(logits).exponential_().clamp_min(1e-20).log()
        chosen = (logits + self.temperatures[:, None] * gumbel).argmax(-1)
        chosen = chosen.masked_fill(self.done, self.stop_id)
        self.done.logical_or_(chosen == self.stop_id)
        self.token.copy_(chosen[:, None])

    def step(self) -> None:
        """Feed the newest token at `position`, choose the next one and store it."""
        self.mask.copy_(torch.where(self.slots <= self.position, 0.0, -torch.inf))
        hidden = self.model.model(
            input_ids=self.token, position_ids=self.position[None], use_cache=False
        ).last_hidden_state
        self.choose(hidden[:, -1])
        self.position.add_(1)
        self.output.index_copy_(1, self.position, self.token)

    @torch.inference_mode()
    def generate(self, prompts: np.ndarray, temperatures: np.ndarray) -> list[np.ndarray]:
        """[N ≤ B, P] prompts, [N] temperatures → N responses; a stop token is their last."""
        self.attach()
        count, pad = len(prompts), self.batch - len(prompts)
        padded = np.pad(prompts.astype(np.int64), ((0, pad), (0, 0)), mode="edge")
        ids = torch.from_numpy(padded).to(self.device)
        self.temperatures.copy_(torch.from_numpy(np.pad(temperatures, (0, pad), mode="edge")))
        self.done.zero_()
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        self.choose(hidden[:, -1])
        self.position.fill_(self.prompt_len)
        self.output.fill_(self.stop_id)
        self.output.index_copy_(1, self.position, self.token)
        for step in range(1, self.max_new):
            if step % STOP_CHECK_STEPS == 0 and self.done.all():
                break
            self.graph.replay() if self.graph else self.step()
        rows = self.output[:count, self.prompt_len :].to("cpu", torch.int16).numpy()
        return [up_to_stop(row, self.stop_id) for row in rows]


def up_to_stop(row: np.ndarray, stop_id: int) -> np.ndarray:
    stops = np.flatnonzero(row == stop_id)
    return row[: stops[0] + 1] if len(stops) else row


def loop_start(tokens: np.ndarray, ngram: int = LOOP_NGRAM) -> int:
    """Where an n-gram first occurs again, or len(tokens) if none does.

    With n = 2, `a b c a b d` gives 3: there the second `a b` starts.
    """
    width = tokens.itemsize
    data, seen = tokens.tobytes(), set()
    for start in range(len(tokens) - ngram + 1):
        window = data[start * width : (start + ngram) * width]
        if window in seen:
            return start
        seen.add(window)
    return len(tokens)


@dataclass(frozen=True)
class Sample:
    prompt: np.ndarray
    response: np.ndarray
    temperature: float
    order: int  # samples of one prompt stay together
    looped: bool


def plan(
    prompts: dict[str, np.ndarray], temperatures: list[float], shares: list[float], seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Which rows of every prompt array are answered at which temperature, in random order."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for name, array in sorted(prompts.items()):
        picks = [rng.permutation(len(array))[: round(share * len(array))] for share in shares]
        temps = [np.full(len(pick), t, np.float32) for pick, t in zip(picks, temperatures)]
        rows, values = np.concatenate(picks), np.concatenate(temps)
        order = rng.permutation(len(rows))
        jobs[name] = rows[order], values[order]
    return jobs


def answer_share(args: argparse.Namespace, worker: int, workers: int) -> tuple[list[Sample], int]:
    """Answer every `workers`-th batch on device `worker`; returns samples and tokens generated.

    Random numbers depend on the batch alone, not on the device that answers it.
    """
    device = torch.device(f"cuda:{worker}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = load_target(args.target or args.data / "target", device, getattr(torch, args.dtype))
    with np.load(args.data / "response_prompts.npz") as file:
        prompts = {name: file[name] for name in file.files}
    jobs = plan(prompts, args.temperatures, args.shares, args.seed)
    batches = [(name, first) for name in jobs for first in range(0, len(jobs[name][0]), args.batch)]
    offsets = dict(zip(sorted(prompts), np.cumsum([0, *map(len, prompts.values())])))
    decoders: dict[str, StaticDecoder] = {}
    samples, generated, started = [], 0, time.perf_counter()
    turns = np.arange(len(batches))
    if args.minutes is not None:
        # Where the time ends before the prompts, every length has had its turns.
        np.random.default_rng(args.seed).shuffle(turns)
    for index in turns[worker::workers].tolist():
        if args.minutes is not None and samples and time.time() > args.deadline:
            break
        name, first = batches[index]
        if name not in decoders:
            width = prompts[name].shape[1]
            decoders[name] = StaticDecoder(model, args.batch, width, args.max_new)
        rows, temps = (part[first : first + args.batch] for part in jobs[name])
        torch.manual_seed(args.seed * 100_003 + index)
        responses = decoders[name].generate(prompts[name][rows], temps)
        generated += sum(map(len, responses))
        for row, temp, response in zip(rows, temps, responses, strict=True):
            loop = loop_start(response)
            cut = min(loop + args.keep_loop, len(response))
            prompt = prompts[name][row].astype(np.int16)
            order = int(offsets[name] + row)
            looped = loop < len(response)
            samples.append(Sample(prompt, response[:cut], float(temp), order, looped))
        rate = generated / (time.perf_counter() - started)
        print(
            f"device {worker}, batch {index + 1}/{len(batches)} {name}: {rate / 1e3:.1f}k tokens/s",
            flush=True,
        )
    return samples, generated


def generate_all(args: argparse.Namespace) -> tuple[list[Sample], dict]:
    """Answer every planned prompt, on all GPUs side by side; returns samples and counts."""
    workers, started = max(1, torch.cuda.device_count()), time.perf_counter()
    if workers == 1:
        parts = [answer_share(args, 0, 1)]
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            tasks = [pool.submit(answer_share, args, worker, workers) for worker in range(workers)]
            parts = [task.result() for task in tasks]
    samples = [sample for part, _ in parts for sample in part]
    generated = sum(count for _, count in parts)
    rate = round(generated / (time.perf_counter() - started))
    return samples, {"generated": generated, "tokens_per_second": rate, "devices": workers}


def write(samples: list[Sample], path: Path, metadata: dict) -> None:
    parts = [part for s in samples for part in (s.prompt, s.response)]
    lengths = [len(s.prompt) + len(s.response) for s in samples]
    tensors = {
        "tokens": torch.from_numpy(np.concatenate(parts)),
        "sequence_start_loc": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.long),
        "prompt_lens": torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32),
        "temperature": torch.tensor([s.temperature for s in samples], dtype=torch.float32),
    }
    save_file(tensors, path, {key: str(value) for key, value in metadata.items()})


def summarize(samples: list[Sample]) -> dict:
    """Counts, and the share of responses that looped, for each temperature."""
    summary = {"samples": len(samples), "tokens": 0, "response_tokens": 0}
    summary["response_tokens"] = sum(len(s.response) for s in samples)
    summary["tokens"] = summary["response_tokens"] + sum(len(s.prompt) for s in samples)
    for temperature in sorted({s.temperature for s in samples}):
        group = [s for s in samples if s.temperature == temperature]
        share = sum(s.looped for s in group) / len(group)
        summary[f"loop_share_t{temperature:g}"] = round(share, 4)
        summary[f"mean_response_t{temperature:g}"] = round(
            sum(len(s.response) for s in group) / len(group), 1
        )
    return summary


def show(model: LlamaForCausalLM, folder: Path, temperature: float = 0.8) -> None:
    """Print a greedy and a sampled completion of every probe."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for probe in PROBES:
        ids = np.array(tokenizer(probe, add_special_tokens=False)["input_ids"])
        decoder = StaticDecoder(model, 2, len(ids), 160)
        pair = decoder.generate(np.stack([ids, ids]), np.array([0.0, temperature], np.float32))
        for name, response in zip(("greedy", f"T={temperature}"), pair, strict=True):
            print(f"--- {name}\n{probe}⟦{tokenizer.decode(response.tolist())}⟧", flush=True)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("build/pair"))
    parser.add_argument("--target", type=Path, help="default: target/ under --data")
    parser.add_argument("--out", type=Path, default=Path("build/pair"))
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.7, 1.0])
    parser.add_argument(
        "--shares", type=numbers, default=[1.0, 0.5, 0.3], help="of the prompts, each"
    )
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--keep-loop", type=int, default=0, help="tokens kept of a loop")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--minutes", type=float, help="begin no batch after them")
    parser.add_argument("--val", type=int, default=500, help="last samples, held back")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print completions of a few probes")
    args = parser.parse_args()
    if len(args.temperatures) != len(args.shares):
        parser.error(
            f"{len(args.temperatures)} --temperatures and {len(args.shares)} --shares; "
            "give one share for each temperature"
        )
    args.deadline = time.time() + 60 * (args.minutes or 0)
    return args


def main() -> None:
    args = parse_args()
    folder = args.target or args.data / "target"
    if args.show:
        show(
            load_target(
                folder,
                torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                getattr(torch, args.dtype),
            ),
            folder,
        )
    samples, summary = generate_all(args)
    # Shuffled by prompt, so that the held-back samples are like the rest but of other prompts.
    ranks = np.random.default_rng(args.seed).permutation(max(s.order for s in samples) + 1)
    samples.sort(key=lambda s: (ranks[s.order], s.temperature))
    summary |= summarize(samples)
    metadata = {
        "format_version": "1",
        "target_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "seed": args.seed,
        "max_new": args.max_new,
        "dtype": args.dtype,
        "loop_ngram": LOOP_NGRAM,
        "keep_loop": args.keep_loop,
        "temperatures": args.temperatures,
        "shares": args.shares,
    }
    split = max(1, len(samples) - args.val)
    args.out.mkdir(parents=True, exist_ok=True)
    write(samples[:split], args.out / "responses.safetensors", metadata)
    write(samples[split:], args.out / "responses_val.safetensors", metadata)
    (args.out / "responses.json").write_text(json.dumps(summary | metadata, indent=2) + "\n")
    print(json.dumps(summary | metadata, indent=2))


if __name__ == "__main__":
    main()
