"""Whether `peagle doctor` names every planted fault and none in healthy heads: JSON lines.

    python benchmarks/doctor.py --pair pair2
    python benchmarks/doctor.py --pair bundled --parts healthy,files

On the bundled pair (whose P-EAGLE head is also taken with a draft vocabulary) and on the second
pair of the tests: healthy heads in many settings; every fault of a head's files alone; two at once;
prompts, target, tokenizer and type; every fault of a serving side, whether it tells draft tokens or
counters; heads early in their training. A fault that costs less than 2% of the acceptance length is
harmless and may go unnamed. The last line is the summary. Exit status 1 if a fault was missed or
anything named wrongly.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.doctor.planting import (
    FILE_FAULTS,
    HEAD_CHANGES,
    MAP_FAULTS,
    OVERFLOW,
    Counting,
    Fault,
    config_of,
    copy_head,
    scramble_tokenizer,
    serve_changed,
    serve_shifted,
    serve_windowed,
    train_shortly,
    turn_target,
    without_fingerprint,
)
from tests.models.editing import edit_config, edit_tensors

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.doctor.examiner import examine
from peagle.doctor.files import examine_files
from peagle.doctor.findings import Examination
from peagle.doctor.probe import Probe, PromptStyle, choose_texts, usual_style
from peagle.doctor.serving import EngineServing, examine_serving
from peagle.models.checkpoint import convert_head, read_head
from peagle.models.target import TargetModel, load_tokenizer

PARTS = ("healthy", "files", "pairs", "surroundings", "served", "undertrained")
PAIR2 = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "pair2"
HARMLESS = 0.02
TWO_FAULTS = (
    ("aux layers + 1", "theta"),
    ("aux layers - 1", "d2t shuffled"),
    ("aux layers + 1", "mask id"),
    ("mask id", "residual"),
    ("mask ids contradict", "mask_hidden untrained"),
    ("mask_hidden after fc", "theta"),
    ("mask_hidden 0", "final norm lost"),
    ("no mask id", "aux layers - 1"),
    ("final norm missing", "map rebuilt"),
    ("norm flag", "t2d contradicts"),
    ("infinite weight", "residual"),
    ("sliding window", "d2t + 1"),
    ("residual", "map rebuilt"),
    ("few positions", "mask_hidden missing"),
)
# Seeds choose half of the prompts; 0 takes all.
HEALTHY = {
    "pair2": [
        # head, format, K, dtype, serving, seed
        ("peagle", "vllm", 6, "float32", "tokens", 0),
        ("peagle", "speculators", 3, "float32", "tokens", 1),
        ("peagle", "vllm", 6, "bfloat16", "tokens", 2),
        ("peagle", "speculators", 4, "bfloat16", "tokens", 3),
        ("peagle", "vllm", 5, "float32", "counters", 4),
        ("peagle", "vllm", 2, "float32", "nothing", 5),
        ("peagle", "vllm", 8, "float32", "tokens", 6),
        ("peagle", "speculators", 1, "float32", "tokens", 7),
        ("peagle", "vllm", 6, "bfloat16", "counters", 8),
    ],
    "bundled": [
        ("peagle", "vllm", 7, "float32", "tokens", 0),
        ("peagle", "speculators", 4, "float32", "tokens", 1),
        ("peagle", "vllm", 7, "bfloat16", "tokens", 2),
        ("peagle", "vllm", 3, "float32", "counters", 3),
        ("peagle", "speculators", 8, "bfloat16", "nothing", 4),
        ("pruned", "vllm", 6, "float32", "tokens", 5),
        ("pruned", "speculators", 5, "bfloat16", "tokens", 6),
        ("eagle3", "vllm", 5, "float32", "tokens", 0),
        ("eagle3", "speculators", 3, "bfloat16", "tokens", 7),
        ("eagle3", "vllm", 4, "float32", "counters", 8),
        ("eagle3", "vllm", 2, "float32", "nothing", 9),
    ],
}


EAGLE3_FAULTS = [
    *(one for one in FILE_FAULTS if one.cause in ("aux_layers", "norms", "residual", "rope")),
    Fault("norm_output", "norms", lambda folder: edit_config(folder, norm_output=True)),
]


def prune(source: Path, folder: Path, ids: Sequence[int]) -> Path:
    """A copy of a head over the whole vocabulary that drafts only these tokens, ascending."""
    shutil.copytree(source, folder)
    vocab = config_of(folder)["vocab_size"]
    kept = torch.tensor(list(ids))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)

    edit_tensors(folder, change)
    edit_config(folder, draft_vocab_size=len(kept))
    return folder


@dataclass
class Pair:
    """A target with its heads, and probes of it."""

    name: str
    folder: Path

    @cached_property
    def target(self) -> Path:
        return PAIR2 / "target" if self.name == "pair2" else Path(BUNDLED_TARGET)

    @cached_property
    def heads(self) -> dict[str, Path]:
        if self.name == "pair2":
            return {"peagle": PAIR2 / "peagle"}
        ids = self.usual.tokens_PN.unique().tolist()
        kept = sorted(list(dict.fromkeys([*ids, *range(2048)]))[:1024])
        pruned = prune(Path(BUNDLED_PEAGLE), self.folder / "pruned", kept)
        return {
            "peagle": Path(BUNDLED_PEAGLE),
            "pruned": pruned,
            "eagle3": Path(BUNDLED_EAGLE3),
        }

    def texts(self, seed: int = 0) -> list[str]:
        """All prompts, or half of them."""
        file = PAIR2 / "prompts.jsonl" if self.name == "pair2" else None
        texts = choose_texts(file, load_tokenizer(self.target))
        return random.Random(seed).sample(texts, len(texts) // 2) if seed else texts

    def probe(
        self,
        k: int = 6,
        dtype: str = "float32",
        seed: int = 0,
        target: Path | None = None,
        style: PromptStyle | None = None,
    ) -> Probe:
        """The target with its answers to these prompts."""
        target = target or self.target
        model = TargetModel.load(target, dtype=getattr(torch, dtype))
        tokenizer = load_tokenizer(target)
        head = PAIR2 / "peagle" if self.name == "pair2" else Path(BUNDLED_PEAGLE)
        config = read_head(head, num_target_layers=model.num_layers).config
        style = style or usual_style(tokenizer)
        return Probe.of(model, tokenizer, style, self.texts(seed), k, config.aux_layer_ids)

    @cached_property
    def usual(self) -> Probe:
        """In float32, K = 6, on all prompts."""
        return self.probe()


@dataclass
class Case:
    """An examination: what was wrong, and what was found."""

    pair: str
    part: str
    case: str
    expected: set[str]
    report: Examination
    seconds: float
    healthy_length: float | None = None

    def line(self) -> dict[str, object]:
        found = {cause.id for cause in self.report.causes}
        side = self.report.figures.get("served" if self.part == "served" else "training_side", {})
        length = side.get("acceptance_length") if isinstance(side, dict) else None
        missed, false = self.expected - found, found - self.expected
        harmless = False
        if missed and not false and length and self.healthy_length:
            harmless = length > (1 - HARMLESS) * self.healthy_length
        result = "right" if not (missed or false) else "harmless" if harmless else "WRONG"
        return {
            "pair": self.pair,
            "part": self.part,
            "case": self.case,
            "result": result,
            "expected": sorted(self.expected),
            "found": [f"{cause.id} ({cause.where})" for cause in self.report.causes],
            "acceptance_length": length and round(length, 3),
            "seconds": round(self.seconds, 1),
            "evidence": [] if result == "right" else [c.evidence for c in self.report.causes],
        }


def healthy(pair: Pair) -> Iterator[Case]:
    """Heads with nothing wrong."""
    for number, (head, style, k, dtype, telling, seed) in enumerate(HEALTHY[pair.name]):
        start, folder = time.monotonic(), pair.heads[head]
        if style == "speculators":
            folder = pair.folder / f"healthy{number}"
            convert_head(pair.heads[head], folder, "speculators", force=False, target=None)
        probe = pair.probe(k, dtype, seed)
        serving = None
        if telling != "nothing":
            engine = EngineServing(probe.target, folder, k)
            serving = engine if telling == "tokens" else Counting(engine)
        report = examine(probe, folder, serving)
        name = f"{head} {style} K={k} {dtype} served: {telling}, prompts {seed}"
        yield Case(pair.name, "healthy", name, set(), report, time.monotonic() - start)


def _faulty(pair: Pair, part: str, head: str, sets: Sequence[Sequence[Fault]]) -> Iterator[Case]:
    best = examine(pair.usual, pair.heads[head]).figures["training_side"]["acceptance_length"]
    for faults in sets:
        start, name = time.monotonic(), " and ".join(fault.name for fault in faults)
        folder = copy_head(pair.heads[head], pair.folder / f"{head} {name}", *faults)
        report = examine(pair.usual, folder)
        causes, seconds = {fault.cause for fault in faults}, time.monotonic() - start
        yield Case(pair.name, part, f"{head}: {name}", causes, report, seconds, best)


def files(pair: Pair) -> Iterator[Case]:
    """Every fault of a head's files by itself."""
    mapped = "peagle" if pair.name == "pair2" else "pruned"
    yield from _faulty(pair, "files", "peagle", [[fault] for fault in FILE_FAULTS])
    yield from _faulty(pair, "files", mapped, [[fault] for fault in MAP_FAULTS])
    if pair.name == "bundled":
        yield from _faulty(pair, "files", "eagle3", [[fault] for fault in EAGLE3_FAULTS])


def pairs(pair: Pair) -> Iterator[Case]:
    """Two faults at once."""
    named = {fault.name: fault for fault in [*FILE_FAULTS, *MAP_FAULTS]}
    mapped = "peagle" if pair.name == "pair2" else "pruned"
    yield from _faulty(pair, "pairs", mapped, [[named[n] for n in two] for two in TWO_FAULTS])


def surroundings(pair: Pair) -> Iterator[Case]:
    """A healthy head with prompts, a target, a tokenizer or a type that are not its own."""
    head, part = pair.heads["peagle"], "surroundings"

    def case(name: str, causes: set[str], probe: Probe, folder: Path = head) -> Case:
        start = time.monotonic()
        report = examine(probe, folder)
        return Case(pair.name, part, name, causes, report, time.monotonic() - start)

    if pair.name == "pair2":
        for style, cause in (
            (PromptStyle(False), "chat_template"),
            (PromptStyle(True, None, False), "thinking"),
        ):
            yield case(f"prompts {style}", {cause}, pair.probe(style=style))
    half = pair.probe(dtype="float16")
    yield case("float16 overflow", {"dtype"}, half, copy_head(head, pair.folder / "o", OVERFLOW))
    yield case("float16, nothing wrong", set(), half)
    other = Pair("bundled" if pair.name == "pair2" else "pair2", pair.folder / "other")
    foreign = Path(BUNDLED_PEAGLE) if pair.name == "pair2" else PAIR2 / "peagle"
    yield case(f"head of the {other.name} pair", {"wrong_target"}, pair.usual, foreign)
    turned = turn_target(pair.target, pair.folder / "turned")
    scrambled = scramble_tokenizer(pair.target, pair.folder / "scrambled")
    unsigned = copy_head(head, pair.folder / "unsigned")
    without_fingerprint(unsigned)
    for folder, words in ((head, ""), (unsigned, ", no fingerprint")):
        probe = pair.probe(target=turned)
        yield case(f"another target{words}", {"wrong_target"}, probe, folder)
        probe = pair.probe(target=scrambled)
        yield case(f"another tokenizer{words}", {"tokenizer"}, probe, folder)


def served(pair: Pair) -> Iterator[Case]:
    """A healthy head in a serving side that runs it wrongly."""
    head = pair.heads["peagle" if pair.name == "pair2" else "pruned"]
    plants: dict[str, tuple[tuple[str, ...], Callable[[pytest.MonkeyPatch], None]]] = {
        "nothing": ((), lambda patch: None),
    }
    plants |= {
        name: (causes, partial(serve_changed, change=change))
        for name, (causes, change) in HEAD_CHANGES.items()
    }
    plants["tokens shifted"] = (("token_shift",), serve_shifted)
    plants["window of 16"] = (("sliding_window",), partial(serve_windowed, window=16))
    sound = examine_files(head, pair.usual.target)
    engine, best = EngineServing(pair.usual.target, head, 6), None
    for telling, serving in (("tokens", engine), ("counters", Counting(engine))):
        for name, (causes, plant) in plants.items():
            start = time.monotonic()
            report = sound.report = Examination()
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                examine_serving(serving, pair.usual, sound)
            seconds = time.monotonic() - start
            # The one of them that is named.
            expected = set(list(filter(report.blames, causes))[:1] or causes[:1])
            if not causes:
                best = report.figures["served"]["acceptance_length"]
            words = f"{name}, told: {telling}"
            yield Case(pair.name, "served", words, expected, report, seconds, best)


def undertrained(pair: Pair) -> Iterator[Case]:
    """New heads early in their training, with the record of it and without."""
    for steps in (10, 60):
        start, folder = time.monotonic(), pair.folder / f"undertrained{steps}"
        folder.mkdir()
        head = train_shortly(pair.usual, folder, steps=steps)
        report = examine(pair.usual, head)
        # Answers that are easy are learned soon: then there is nothing wrong.
        causes: set[str] = {"training"} if report.causes else set()
        seconds = time.monotonic() - start
        yield Case(pair.name, "undertrained", f"{steps} steps", causes, report, seconds)
        start = time.monotonic()
        report = examine(pair.usual, copy_head(head, folder / "unrecorded"))
        # Nothing tells a head that has learned next to nothing from one of another target.
        causes = {cause.id for cause in report.causes} & {"training", "wrong_target"}
        seconds = time.monotonic() - start
        yield Case(pair.name, "undertrained", f"{steps}, no record", causes, report, seconds)


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--pair", choices=("pair2", "bundled"), action="append")
    options.add_argument("--parts", default=",".join(PARTS), help="of the examinations")
    args = options.parse_args()
    makers = dict(
        zip(PARTS, (healthy, files, pairs, surroundings, served, undertrained), strict=True)
    )
    counts: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.pair or ("pair2", "bundled"):
            pair = Pair(name, Path(folder) / name)
            pair.folder.mkdir()
            for part in args.parts.split(","):
                for case in makers[part](pair):
                    line = case.line()
                    counts[name, part, str(line["result"])] += 1
                    print(json.dumps(line), flush=True)
    table: dict[str, dict[str, int]] = {}
    for (name, part, result), count in sorted(counts.items()):
        table.setdefault(f"{name} {part}", {})[result] = count
    print(json.dumps({"summary": table}))
    sys.exit(any(result == "WRONG" for _, _, result in counts))


if __name__ == "__main__":
    main()
