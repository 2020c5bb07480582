"""Show what `peagle adapt` brings on traffic of one kind, on one GPU and without a network.

    python recipes/smollm2/adapt.py --target build/smollm2/target --kind forms

The target's greedy answers are recorded as `peagle serve --record` does. `peagle adapt` fits the
correction on them and, in another run, trains the head; old data are answers to prompts that the
target writes. Then the outputs are exchanged at random, which has to be refused. A step that is
done is skipped when the same command runs again. The last line is one JSON object; its seconds are
those of whole steps, loading included.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "benchmark_pair"), str(HERE.parent / "prompt_sets")]

import torch  # noqa: E402
from jobs import Job, gpus, run_jobs  # noqa: E402
from kinds import KINDS, prompts_of  # noqa: E402

from peagle import LLM, SamplingParams  # noqa: E402
from peagle.data import recorded  # noqa: E402
from peagle.environment import environment  # noqa: E402
from peagle.models.fingerprint import identity_of  # noqa: E402

MINUTES = {"correction": 1.5, "head": 7}  # of training steps
LEAST = 100  # prompts, of which a tenth is held out
OLD_SEED = 1000  # make.py, whose prompts the head was trained on, takes other ones
REPORTED = ("refusal", "k", "steps", "requests", "own_outputs", "held_out", "old", "kept_share")
Result = dict[str, Any]


def record(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Record requests, one a second, in place of what the folder holds."""
    shutil.rmtree(folder, ignore_errors=True)
    path = recorded.new_record_file(recorded.RecordFolder.create(folder).path, time.time())
    start_s = recorded.began_s(path)
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            file.write(recorded.line_of(None, start_s + number, row, None))


class Steps:
    """The steps, in OUTPUT/KIND."""

    def __init__(self, args: Any) -> None:
        self.args, self.folder = args, (args.output / args.kind).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, make: Callable[[], Result]) -> Result:
        """Return the result of a step and its seconds, from NAME.json where it is done."""
        file = self.folder / f"{name}.json"
        if not file.is_file():
            start_s = time.monotonic()
            result = make()
            result["seconds"] = round(time.monotonic() - start_s, 1)
            file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))

    def peagle(self, name: str, *words: object) -> int | None:
        """Run a command of peagle, and return its status; end if it failed."""
        job = Job(name, (sys.executable, "-m", "peagle", *map(str, words)))
        status = run_jobs([job], gpus()[:1], self.folder / "logs", float("inf"))[name]
        if status not in (0, 3):  # 3: the new head is refused
            sys.exit(f"error: {name} failed; {self.folder / 'logs'} has what it printed.")
        return status

    def traffic(self) -> Result:
        """Let the target answer the prompts, and record them."""
        args, prompts = self.args, prompts_of(self.args.kind, self.args.prompts)
        llm = LLM(args.target, speculative_config={"model": args.draft})
        params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
        if llm.tokenizer.chat_template:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = [answer.output for answer in llm.chat(chats, params)]
        else:
            outputs = llm.generate(prompts, params)
        facts = {"model": args.target, **identity_of(llm.target), "temperature": 0.0}
        ids = ("finish_reason", "prompt_token_ids", "response_token_ids")
        found = [(one.finish_reason, one.prompt_token_ids, one.token_ids) for one in outputs]
        record(self.folder / "traffic", (facts | dict(zip(ids, one, strict=True)) for one in found))
        names = ("kind", "target", "draft", "prompts", "max_tokens")
        result: Result = {name: getattr(args, name) for name in names}
        result["output_tokens"] = sum(len(output) for *_, output in found)
        result["environment"] = environment(llm.target.device)
        del llm, outputs
        gc.collect()  # an engine and its parts refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    def old(self) -> Result:
        """Let the target write general prompts and answer them; prepare the answers."""
        args, target = self.args, ("--target", self.args.target)
        prompts, answers = (self.folder / f"old-{one}.jsonl" for one in ("prompts", "answers"))
        words = ("--count", args.old_prompts, "--seed", OLD_SEED, "--output", prompts)
        self.peagle("old-prompts", "data", "synthesize", *target, "--no-speculation", *words)
        words = ("--draft", args.draft, "--max-new-tokens", args.max_tokens, "--output", answers)
        self.peagle("old-answers", "data", "regenerate", prompts, *target, *words)
        words = ("--overwrite", "--output", self.folder / "old.safetensors")
        self.peagle("old-data", "data", "prepare", answers, *target, *words)
        return {"prompts": args.old_prompts}

    def adapt(self, name: str, what: str, traffic: str, *words: object) -> Result:
        """Adapt the head to recorded traffic; return what the report says."""
        new, report = self.folder / f"{name}-head", self.folder / "logs" / f"{name}.json"
        shutil.rmtree(new, ignore_errors=True)
        models = (self.args.draft, "--target", self.args.target, "--what", what)
        places = ("--traffic", self.folder / traffic, "--output", new, "--report", report)
        status = self.peagle(name, "adapt", *models, *places, *words)
        found = json.loads(report.read_text(encoding="utf-8"))
        return {"passed": status == 0, **{key: found[key] for key in REPORTED}}

    def exchange(self, seed: int) -> Result:
        """Exchange the outputs of the traffic at random, and try to fit a correction on it."""
        files = recorded.record_files(self.folder / "traffic")
        rows = [row for file in files for _, row in recorded.recorded_lines(file) if row]
        outputs = [row["response_token_ids"] for row in rows]
        Random(seed).shuffle(outputs)
        facts = [{k: v for k, v in row.items() if k not in ("key_id", "time")} for row in rows]
        pairs = zip(facts, outputs, strict=True)
        record(self.folder / "exchanged", (row | {"response_token_ids": one} for row, one in pairs))
        return self.adapt(f"exchanged-{seed}", "correction", "exchanged", "--steps", 1)


def main() -> None:
    """Run the steps, and print what came of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    options.add_argument("--draft", default="smollm2", help="P-EAGLE head (smollm2)")
    options.add_argument("--kind", choices=KINDS, default="forms", help="of the traffic (forms)")
    options.add_argument("--output", type=Path, default=Path("build/adapt"), help="(build/adapt)")
    options.add_argument("--prompts", type=int, default=2400, help="number of requests (2400)")
    options.add_argument("--max-tokens", type=int, default=256, help="of an answer, at most (256)")
    options.add_argument("--old-prompts", type=int, default=2560, help="of the old data (2560)")
    options.add_argument("--what", nargs="+", choices=MINUTES, default=list(MINUTES))
    options.add_argument("--steps", type=int, help="of each training, in place of minutes")
    options.add_argument("--old-share", type=float, help="as of `peagle adapt`")
    options.add_argument("--refusals", type=int, default=3, help="number of exchanges (3)")
    args = options.parse_args()
    if min(args.prompts, args.old_prompts) < LEAST:
        options.error(
            f"--prompts is {args.prompts}, --old-prompts is {args.old_prompts}; a verdict of "
            f"`peagle adapt` needs at least {LEAST} of both."
        )
    steps = Steps(args)
    try:
        result: Result = {"traffic": steps.once("traffic", steps.traffic)}
    except ValueError as error:  # a mistake of the user's
        options.error(str(error))
    result["old"] = steps.once("old", steps.old)
    for what in args.what:
        limit = ("--steps", args.steps) if args.steps else ("--minutes", MINUTES[what])
        limit += () if args.old_share is None else ("--old-share", args.old_share)
        words = (what, what, "traffic", "--old", steps.folder / "old.safetensors", *limit)
        result[what] = steps.once(what, partial(steps.adapt, *words))
    seeds = range(args.refusals)
    tried = [steps.once(f"exchanged-{seed}", partial(steps.exchange, seed)) for seed in seeds]
    refused = sum(one["refusal"] != "" and one["held_out"] is None for one in tried)
    own = [one["own_outputs"] for one in tried]
    result["exchanged"] = {"tried": len(tried), "refused": refused, "own_outputs": own}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
