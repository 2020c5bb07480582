"""Files as eval, bench and tune write them, with made-up numbers of a likely size."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from peagle.engine import SpeculationStats
from peagle.evaluation.acceptance import conditional_acceptance
from peagle.evaluation.objective import LatencyObjective
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.results import Percentiles, RunFigures

ENVIRONMENT = {
    "peagle": "0.1.0",
    "commit": "2ba806fade07",
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "device": "NVIDIA H100 80GB HBM3",
    "cpu": "Intel(R) Xeon(R) Processor",
    "threads": 16,
}
SOURCES = {"plain": "", "ngram": "", "eagle3": "./heads/eagle3", "peagle": "./heads/peagle"}
# P(next draft accepted | those before it): the first, and its factor from one to the next.
CHANCES = {"peagle": (0.79, 0.978), "eagle3": (0.76, 0.90), "ngram": (0.32, 1.02)}
SETS = {"humaneval": (164, 1.0), "mt_bench": (160, 0.88), "gsm8k": (200, 1.04)}
CATEGORIES = {
    "mt_bench/writing": 0.80,
    "mt_bench/math": 1.04,
    "mt_bench/coding": 1.02,
    "structured/json": 1.10,
}
CODE = {
    "def mean(numbers) -> float:\n": "    return sum(numbers) / len(numbers)\n",
    "def is_close(a, b, threshold) -> bool:\n": """\
    for first, second in zip(a, b):
        if abs(first - second) > threshold:
            return False
    return True
""",
}


def provenance(command: str, **more: Any) -> dict[str, Any]:
    return {
        "command": command,
        "created": "2026-11-21T18:40:12+00:00",
        "environment": dict(ENVIRONMENT),
        "target": "code-150m",
        "dtype": "bfloat16",
        **more,
    }


# ---- acceptance.json ----


def make_slice(method: str, k: int, factor: float, drafts: int, requests: int) -> dict[str, Any]:
    first, fall = CHANCES[method]
    counts = [drafts]
    for i in range(k):
        counts.append(round(counts[-1] * min(0.97, first * factor * fall**i)))
    stats = SpeculationStats(drafts, drafts * k, sum(counts[1:]), counts[1:])
    length, wide = stats.acceptance_length, 1.6 / requests**0.5

    def around(share: float | None, wide: float) -> list[float] | None:
        return None if share is None else [max(0, share - wide), min(1, share + wide)]

    unconditional, conditional = stats.acceptance_per_pos, conditional_acceptance(stats)
    return stats.to_json() | {
        "num_requests": requests,
        "num_tokens": round(drafts * length),
        "acceptance_length": length,
        "acceptance_length_ci": [length - wide, length + wide],
        "unconditional": unconditional,
        "unconditional_ci": [around(share, wide / 5) for share in unconditional],
        "conditional": conditional,
        "conditional_ci": [around(share, wide / 4) for share in conditional],
        "tokens_per_step": length * 0.99,
        "loop_share": 0.06,
        "acceptance_length_before_loop": length * 0.96,
    }


def pieces_of(text: str, chance: float, rng: random.Random) -> list[list[str]]:
    tokens = re.findall(r"\n+ *|[ ]*\w+|[ ]*[^\w\s]+| +", text)
    assert "".join(tokens) == text
    return [[token, "accepted" if rng.random() < chance else "target"] for token in tokens]


def make_entry(method: str, k: int, temperature: float, rng: random.Random) -> dict[str, Any]:
    cooled = 1.0 - 0.12 * temperature

    def ranges(edges: list[int], falling: float) -> list[dict[str, Any]]:
        pairs = list(pairwise(edges))
        return [
            {
                "from": low,
                "to": high,
                "slice": make_slice(method, k, cooled * (1 - falling * i), 4000 >> i, 200 >> i),
            }
            for i, (low, high) in enumerate(pairs)
        ]

    pooled = make_slice(method, k, cooled * 0.98, 24_000, 524)
    lengths = [
        min(k + 1.0, max(1.0, rng.gauss(pooled["acceptance_length"], 0.75))) for _ in range(524)
    ]
    bins = [(1 + i / 2, 1.5 + i / 2) for i in range(2 * k + 1)]
    chance = 1 - 1 / pooled["acceptance_length"]
    return {
        **{"method": method, "source": SOURCES[method], "k": k, "temperature": temperature},
        **{"draft_sampling": "argmax", "engine": "peagle"},
        "pooled": pooled,
        "by_set": {
            name: make_slice(method, k, cooled * factor, 8000, size)
            for name, (size, factor) in SETS.items()
        },
        "by_category": {
            name: make_slice(method, k, cooled * factor, 900, 20)
            for name, factor in CATEGORIES.items()
        },
        "by_context": ranges([0, 256, 512, 1024, 2048, 4096], 0.025),
        "by_output_position": ranges([0, 64, 256, 1024, 4096], 0.03),
        "histogram": [
            {"from": a, "to": b, "count": sum(a <= length < b for length in lengths)}
            for a, b in bins
        ],
        "loop_share": 0.06,
        "hardest": [
            {
                **{"set": "humaneval", "id": "HumanEval/39", "text_before": "    primes = ["},
                **{"text": "433494437, 2971215073", "acceptance_length": 1.19, "num_drafts": 16},
            },
        ],
        "samples": [
            {
                "set": "humaneval",
                "id": f"HumanEval/{number}",
                "acceptance_length": pooled["acceptance_length"],
                "prompt_tail": head,
                "pieces": pieces_of(code, chance, rng),
            }
            for number, (head, code) in enumerate(CODE.items())
        ],
    }


def acceptance(
    methods: tuple[str, ...] = ("ngram", "eagle3", "peagle"),
    ks: tuple[int, ...] = (3, 5, 7),
    temperatures: tuple[float, ...] = (0.0, 0.7),
) -> dict[str, Any]:
    """acceptance.json."""
    rng = random.Random(7)
    return {
        "format_version": 1,
        "provenance": provenance("peagle eval --draft ./heads/peagle -k 3,5,7 --output results"),
        "settings": {
            "sets": {name: size for name, (size, _) in SETS.items()},
            "max_new_tokens": 512,
            "chat_template": False,
            "thinking": None,
            "seed": 0,
        },
        "entries": [
            make_entry(method, k, temperature, rng)
            for temperature in temperatures
            for method in methods
            for k in ks
        ],
    }


# ---- throughput.json ----


def speed(method: str, k: int, concurrency: int) -> float:
    """Tokens per second of a made-up machine."""
    step = 5.85 + 0.02 * concurrency + max(0.0, concurrency * (k + 1) - 160) * 0.019
    if method == "plain":
        return 1000 * concurrency / step
    al = make_slice(method, k, 1.0, 10_000, 100)["acceptance_length"]
    draft = {"peagle": 0.8, "eagle3": 0.3 * k, "ngram": 0.05}[method]
    return 1000 * concurrency * al / (step + draft + 0.01 * concurrency)


def make_repeat(point: SweepPoint, rng: random.Random) -> RunFigures:
    factor = SETS[point.set][1] if point.k else 1.0
    rate = speed(point.method, point.k, point.concurrency) * factor * rng.gauss(1, 0.02)
    itl = point.concurrency / rate
    times = Percentiles(p50=itl, p90=itl * 1.3, p99=itl * 2.1, mean=itl * 1.05)
    slice_ = make_slice(point.method, point.k, factor, 8000, 100) if point.k else {}
    return RunFigures(
        seconds=256 * 64 / rate,
        num_requests=64,
        num_tokens=64 * 256,
        output_tokens_per_s=rate,
        requests_per_s=rate / 256,
        ttft_s=times,
        itl_s=times,
        e2e_s=times,
        acceptance_length=slice_.get("acceptance_length"),
        gpu_busy=min(0.99, 0.9 + point.concurrency / 800),
    )


def make_cell(method: str, k: int, load: int, least: float, most: float) -> dict[str, Any]:
    """A cell of three repeats at these speeds and between."""
    repeats = [{"output_tokens_per_s": (least + most) / 2}] * 3
    return {
        **{"method": method, "k": k, "concurrency": load, "set": "humaneval", "repeats": repeats},
        "median": repeats[0],
        "spread": {"output_tokens_per_s": [least, most]},
    }


def throughput(
    methods: tuple[str, ...] = ("plain", "ngram", "eagle3", "peagle"),
    ks: tuple[int, ...] = (3, 5, 7),
    concurrencies: tuple[int, ...] = (1, 4, 16, 64),
    sets: tuple[str, ...] = ("humaneval", "mt_bench"),
    **more: Any,
) -> dict[str, Any]:
    """throughput.json; `more` is passed on to `summarize`."""
    rng = random.Random(3)
    points = [
        SweepPoint(method, SOURCES[method], "peagle", k, concurrency, name)
        for name in sets
        for method in methods
        for k in ((0,) if method == "plain" else ks)
        for concurrency in concurrencies
    ]
    results = summarize(
        {point: [make_repeat(point, rng) for _ in range(3)] for point in points},
        LatencyObjective.parse("ttft=500ms,itl=20ms@p90"),
        provenance=provenance("peagle bench --draft ./heads/peagle --output results"),
        settings={
            "sets": dict.fromkeys(sets, 64),
            "max_new_tokens": 256,
            "temperature": 0.0,
            "objective": {"ttft_ms": 500, "itl_ms": 20, "percentile": 90},
        },
        **more,
    )
    return results.to_json()


# ---- tune.json ----


def tune() -> dict[str, Any]:
    """tune.json."""
    rng = random.Random(5)
    batches, ks = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 5, 7)
    fitted = {(1, 0), (1, 7), (8, 3), (16, 5), (64, 0), (64, 7)}
    predictions = []
    for batch in batches:
        for k in ks:
            predicted = speed("peagle", k, batch) if k else speed("plain", 0, batch)
            predictions.append(
                {
                    **{"batch": batch, "k": k, "predicted_tokens_per_s": predicted},
                    "measured_tokens_per_s": predicted * rng.gauss(1, 0.04),
                    "fitted": (batch, k) in fitted,
                }
            )
    return {
        "format_version": 1,
        "provenance": provenance("peagle tune --target ./code-150m --draft ./heads/peagle"),
        "settings": {"context": 512},
        "costs": {
            "target_s": [[t, 0.0058 + max(0, t - 96) * 1.6e-5] for t in (1, 8, 32, 128, 512)],
            "draft_s": [[r, 0.00077 + r * 2.4e-6] for r in (2, 14, 56, 224, 896)],
            "step_s": [[1, 7, 0.0071, True]],
        },
        "acceptance": {
            "source": "acceptance.json",
            "acceptance_length": {
                str(k): make_slice("peagle", k, 1.0, 8000, 100)["acceptance_length"] for k in ks[1:]
            },
        },
        "predictions": predictions,
        "speculative_config": {
            "peagle": {"model": "./heads/peagle", "num_speculative_tokens": 7},
            "vllm": {"method": "eagle3", "model": "./heads/peagle", "parallel_drafting": True},
        },
        "check": {"num_unfitted": 36, "within_10_percent": 35, "share": 35 / 36, "worst": 0.112},
        "schedule": [[1, 12, 7], [13, 31, 5], [32, 64, 3]],
        "trees": [
            {
                "parallel_drafting_spec": {
                    "num_parallel_trees": nodes,
                    "prediction_depth": 7,
                    "max_nodes": nodes,
                },
                "acceptance_length": length,
                "tokens_per_s": [[1, 140.0 * length], [8, 900.0 * length], [64, 2000.0 * length]],
                "wins_at": wins,
            }
            for nodes, length, wins in ((7, 4.13, [8]), (16, 4.86, [1]))
        ],
        "break_even": [
            {
                "batch": b,
                "k": k,
                "acceptance_length": 1.12 + 0.01 * k + max(0, b * (k + 1) - 160) / 500,
            }
            for b in batches
            for k in (3, 7)
        ],
    }


def write(folder: Path, **documents: dict[str, Any]) -> Path:
    """write(folder, acceptance=..., ...) puts each into its file: the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder
