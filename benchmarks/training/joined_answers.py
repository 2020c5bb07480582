"""Answers of a conversation in one row against a row for each: cost, and what training gives.

    python benchmarks/training/joined_answers.py cost
    python benchmarks/training/joined_answers.py train --output /tmp/joined --seeds 1,2,3

`cost` makes conversations of many answers, prepares them, and counts the tokens of the samples.

`train` lets the bundled target answer the package's prompts, five in a conversation, each behind
all that was said before. The bundled head goes on with them twice for each seed: with one
row a conversation, and with one row an answer, as many steps with the same answers in each. Both
are judged by the same answers to held-out questions of GSM8K, each in a row of its own, at the
temperature of the answers. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from peagle import LLM, SamplingParams
from peagle.data.batches import BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.data.readers import Record, read_records
from peagle.data.samples import Sample, SampleMaker
from peagle.models.end_tokens import eos_token_ids
from peagle.models.target import load_tokenizer
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "src" / "peagle" / "bundled"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}# Question\n{{ m.content }}\n# Answer\n"
    "{% else %}{{ m.content }}<|endoftext|>\n{% endif %}{% endfor %}"
)
TURNS, ANSWER = 5, 64  # answers of a conversation, tokens of an answer
HELD_OUT = 50  # prompts
TRAINED_SETS = ("gsm8k", "humaneval", "mt_bench", "heldout_code", "summarization")
MULTIPLE = 64  # of tokens in a row
MOST_CHARACTERS = 800  # of a prompt
WORDS = "the a model writes answers about code because people ask many things and some are long"


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cost = commands.add_parser("cost", formatter_class=parser.formatter_class)
    cost.add_argument("--target", type=Path, default=BUNDLED / "target", help="its tokenizer")
    cost.add_argument("--answers", default="10,100,200", help="of a conversation, a list")
    cost.add_argument("--conversations", type=int, default=3)
    cost.add_argument("--words", default="20,60", help="of a question and of an answer")
    train = commands.add_parser("train", formatter_class=parser.formatter_class)
    train.add_argument("--output", type=Path, required=True)
    train.add_argument("--seeds", default="1,2,3", help="a list")
    train.add_argument("--steps", type=int, default=40)
    train.add_argument("--conversations", type=int, default=80, help="to train on")
    train.add_argument("--in-step", type=int, default=4, help="conversations of a step")
    train.add_argument("--temperature", type=float, default=1.0, help="of the answers")
    options = parser.parse_args()
    if options.command == "cost":
        for answers in map(int, options.answers.split(",")):
            print(json.dumps(measure_cost(options, answers)), flush=True)
    else:
        compare_training(options)


# ---- cost ----


def measure_cost(options: argparse.Namespace, answers: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(options.target)
    maker = SampleMaker(
        tokenizer, eos_token_ids(options.target, tokenizer), chat_template=TEMPLATE, chat=True
    )
    chance = random.Random(answers)

    def say(count: int) -> str:
        return " ".join(chance.choices(WORDS.split(), k=count))

    asked, answered = map(int, options.words.split(","))
    counts = {"conversation": 0, "joined": 0, "separate": 0}
    started = time.process_time()
    for number in range(options.conversations):
        messages = []
        for turn in range(answers):
            content = f"{number}.{turn} {say(asked)}"
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": say(answered)})
        made = maker.samples(Record({"messages": messages}, number, f"{number}"))
        samples = [one for one in made if isinstance(one, Sample)]
        spans = [span for sample in samples for span in sample.answers]
        assert len(spans) == answers, "every answer is supervised"
        counts["conversation"] += max(len(sample.ids) for sample in samples)
        counts["joined"] += sum(len(sample.ids) for sample in samples)
        counts["separate"] += sum(end for _, end in spans)
    seconds = time.process_time() - started
    tokens = counts["conversation"]
    return {
        "answers": answers,
        "tokens_of_a_conversation": tokens // options.conversations,
        "joined": round(counts["joined"] / tokens, 3),
        "separate": round(counts["separate"] / tokens, 1),
        "seconds_of_a_conversation": round(seconds / options.conversations, 2),
    }


# ---- training ----


def compare_training(options: argparse.Namespace) -> None:
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [prompt for name in TRAINED_SETS for prompt in read_prompts(name)]
    held_out = read_prompts("gsm8k")[-HELD_OUT:]
    prompts = [prompt for prompt in prompts if prompt not in held_out]
    random.Random(0).shuffle(prompts)
    sets = {"train": prompts[: options.conversations * TURNS], "held_out": held_out}
    sizes = {}
    for name, questions in sets.items():
        rows = folder / f"{name}.joined.jsonl"
        if not rows.is_file():
            write_conversations(questions, options.temperature, rows)
        sizes[name] = separate(rows, folder / f"{name}.separate.jsonl")
    print(json.dumps(sizes), flush=True)
    found: dict[str, list[float]] = {"joined": [], "separate": []}
    for seed in map(int, options.seeds.split(",")):
        steps = sizes["train"]["samples"] // options.in_step
        for form, results in found.items():
            row = train(options, form, seed, sizes["train"], steps)
            steps = row["steps_per_epoch"]  # rows of answers: as many as conversations have
            results.append(row["acceptance_lengths"][-1])
            print(json.dumps(row), flush=True)
    for form, results in found.items():
        spread = stdev(results) if len(results) > 1 else None
        print(json.dumps({"rows": form, "mean": fmean(results), "deviation": spread}))


def read_prompts(name: str) -> list[str]:
    lines = (BUNDLED / "prompts" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0][:MOST_CHARACTERS] for line in lines]


def write_conversations(questions: list[str], temperature: float, output: Path) -> None:
    """Let the bundled target answer, turn after turn; the prompt has all that was said before."""
    llm = LLM("bundled", max_num_seqs=64)
    ids: list[list[int]] = [[] for _ in range(0, len(questions), TURNS)]
    masks: list[list[int]] = [[] for _ in ids]
    for turn in range(TURNS):
        for number, (prompt, mask) in enumerate(zip(ids, masks, strict=True)):
            text = f"# Question\n{questions[number * TURNS + turn]}\n# Answer\n"
            prompt += llm.tokenizer.encode(text, add_special_tokens=False)
            mask += [0] * (len(prompt) - len(mask))
        params = [
            SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=number * TURNS + turn)
            for number in range(len(ids))
        ]
        for number, answer in enumerate(llm.generate(ids, params)):
            ids[number] += answer.token_ids
            masks[number] += [1] * len(answer.token_ids)
    rows = zip(ids, masks, strict=True)
    with output.open("w") as lines:
        lines.writelines(json.dumps({"input_ids": i, "loss_mask": m}) + "\n" for i, m in rows)


def separate(rows: Path, output: Path) -> dict[str, Any]:
    """Write each answer behind its prompt as a line of its own, and count both forms."""
    made = (one for record in read_records(rows) for one in SampleMaker(None).samples(record))
    samples, ends = [one for one in made if isinstance(one, Sample)], []
    with output.open("w") as lines:
        for sample in samples:
            for begin, end in sample.answers:
                ends.append(end)
                row = {"prompt_token_ids": sample.ids[:begin]}
                row["response_token_ids"] = sample.ids[begin:end]
                lines.write(json.dumps(row) + "\n")
    return {
        "samples": len(samples),
        "answers": len(ends),
        "longest": max(ends),
        "tokens": {"joined": sum(len(one.ids) for one in samples), "separate": sum(ends)},
    }


def train(
    options: argparse.Namespace, form: str, seed: int, sizes: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Train with the most rows a step that leave an epoch so many steps."""
    folder = options.output.absolute()
    row = sizes["longest"] + -sizes["longest"] % MULTIPLE
    file = folder / f"train.{form}.jsonl"
    dataset = ResponseDataset.load(file, load_tokenizer(BUNDLED / "target"), 2048, 2048)
    streams = (BatchStream(dataset, rows * row, MULTIPLE, seed) for rows in range(1, 100))
    num_rows = max(s.num_rows for s in streams if s.steps_per_epoch >= steps)
    changes = [
        f"data.train={file}",
        f"data.validation={folder / 'held_out.separate.jsonl'}",
        "data.max_length=2048",
        f"data.batch_tokens={num_rows * row}",
        f"data.length_multiple={MULTIPLE}",
        f"optimizer.steps={options.steps}",
        f"run.seed={seed}",
        "run.validation_batches=1000",
        f"run.validate_every={options.steps}",
        f"run.validation_temperature={options.temperature}",
        f"run.select={'sampled' if options.temperature else 'greedy'}",
    ]
    config = TrainConfig.read(ROOT / "recipes" / "quickstart.toml", changes)
    config = config.model_copy(update={"output": folder / f"{form}-{seed}"})
    before, wall = time.process_time(), time.perf_counter()
    trainer = Trainer(config)
    record = trainer.run()
    validation = record["best"]["validation"]
    drawn = "sampled_" if options.temperature else ""
    return {
        "rows": form,
        "seed": seed,
        "acceptance_lengths": validation[f"{drawn}acceptance_lengths"],
        "loss": validation["loss"],
        "steps_per_epoch": trainer.stream.steps_per_epoch,
        "rows_of_a_step": trainer.stream.num_rows,
        "epochs": record["epochs"],
        "tokens": trainer.num_tokens,
        "cpu_seconds": round(time.process_time() - before),
        "seconds": round(time.perf_counter() - wall),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
