"""`peagle make-head`: make a draft head for a model without data, by the other commands."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import typer

from peagle.bundled import pair_of
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.head_plan import (
    MAX_CORRECTION_STEPS,
    HeadPlan,
    HeadProbe,
    eval_prompts,
    make_head_plan,
    training_steps,
)
from peagle.cli.setup import check_paths, quiet_libraries
from peagle.cli.stages import Stage, Stages
from peagle.cli.terminal import command_prefix
from peagle.config import require_writable_folder
from peagle.disk import locked
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import NGRAM
from peagle.results import ACCEPTANCE, AcceptanceResults, read_document

EXAMPLES = """
A head for the chat model that the name smollm2 fetches, in 20 minutes:
  peagle make-head smollm2 --output made

A head for a model of your own of which you have no data, in 20 minutes:
  peagle make-head ./Qwen3-0.6B --no-thinking --output qwen

An EAGLE-3 head, on prompts of your own, in an hour:
  peagle make-head ./Qwen3-0.6B --no-thinking --output qwen --head eagle3 --prompts prompts.jsonl \\
      --minutes 60

Another value of the training configuration, as in `peagle train`:
  peagle make-head ./Qwen3-0.6B --no-thinking --output qwen --set head.draft_vocab_size=32000

Interrupted? The same command again goes on where it was.
"""
HEADS = Literal["peagle", "eagle3"]
_PROBE_MINUTES = 0.2  # minutes of training
_PROBE_PROMPTS = {"cuda": 1024, "cpu": 24}  # a process, some for each sequence of its batch
# Where a target is small, a second start of its processes would take longer than their work.
_START_MINUTES = 8  # of --minutes that pass before a card works, about
_PROMPTS_A_MINUTE = 1000  # of each process of a small target, for each of the other minutes
_NUM_STARTS = 6  # of the stages behind the first, each about as long as its own
_ANSWERS_SHARE = 0.75  # of the time without starts, if all answers were of the full length
# One process cannot keep a card busy with a target of at most this size; several can.
_SMALL_TARGET_BYTES = 2 * 2**30
_MAX_PROCESSES = 4
_CORES_PER_PROCESS = 2
_KV_SHARE = 0.7  # share of a card's free memory for the KV caches of all processes together
_TEMPERATURES = "0,0.7"  # each prompt is answered at one of them
_EVAL_TOKENS = 256
_EVAL_AT_ONCE = 16
_VALIDATION_SHARE = 0.03
_NUM_VALIDATIONS = 3
_NUM_SAVES = 6
_STAGES = ("synthesize", "regenerate", "prepare", "train", "correction", "eval")
_PLANNED = {"run.minutes", "optimizer.steps", "correction.steps"}
_FREEZE = ("head.freeze_embeddings=true", "head.freeze_lm_head=true")


def make_head(
    target: str = typer.Argument(
        ...,
        metavar="TARGET",
        help="The target: a folder, a GGUF file, a hub id, bundled or smollm2.",
    ),
    output: Path = typer.Option(
        ..., "--output", "-o", help="Folder of the data, the head (in head/) and the results."
    ),
    minutes: float = typer.Option(20.0, help="Minutes that all stages may take together."),
    head: HEADS = typer.Option("peagle", help="Kind of the head."),
    prompts: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Prompts to answer, as `peagle data regenerate` reads them.",
        show_default="prompts that the target writes itself",
    ),
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode in which the head will serve; needed if the chat template has one.",
        show_default=False,
    ),
    max_new_tokens: int | None = typer.Option(
        None,
        min=16,
        help="Largest number of tokens of an answer.",
        show_default="512 on a GPU, else 256",
    ),
    freeze: bool = typer.Option(
        False, "--freeze", help="Keep the target's own rows as the head's embeddings and lm_head."
    ),
    overrides: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Value of the training configuration; may be repeated.",
    ),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Make a draft head for a model from nothing, in the minutes that you give.

    The target writes prompts and answers them, half greedily and half at temperature 0.7; a head is
    trained on the answers for at most 3 epochs, gets a correction if it is a P-EAGLE head, and is
    compared with prompt lookup. The first prompts and answers and a short training are measured;
    then a plan with the minutes of all stages is printed. Each stage is a command of peagle, shown
    as it runs. The same command goes on where it was stopped.
    """
    if not 0 < minutes < inf:
        raise UserError(f"--minutes is {minutes:g}; expected a finite number above 0.")
    require_writable_folder(output, "--output")
    work = output / "make-head"
    journal = work / "journal.json"
    if output.is_dir() and any(output.iterdir()) and not work.is_dir():
        raise UserError(
            f"--output {str(output)!r} is not empty, and `peagle make-head` did not begin it; "
            "choose a new folder."
        )
    if prompts is not None:
        from peagle.data.readers import table_files

        table_files(prompts)  # refuses a missing file
    overrides = [*(_FREEZE if freeze else ()), *(overrides or ())]
    fits_correction = _check_overrides(head, overrides)
    check_paths(target)
    from peagle.models.loading import resolve_model

    folder = resolve_model(target)
    quiet_libraries()
    from peagle.engine.placement import resolve_device

    on_gpu = resolve_device("auto").type == "cuda"
    longest = max_new_tokens or (512 if on_gpu else 256)
    options = {
        "target": target,
        "head": head,
        "prompts": None if prompts is None else str(prompts.absolute()),
        "thinking": thinking,
        "max_new_tokens": longest,
        "set": overrides,
    }
    text_output = 1 if output_format is OutputFormat.TEXT else 2
    say = partial(print, file=sys.stdout if text_output == 1 else sys.stderr, flush=True)
    with locked(work):
        stages = Stages(journal, options, text_output)
        maker = _Maker(
            stages,
            output,
            target,
            folder,
            prompts,
            head,
            fits_correction,
            thinking,
            longest,
            on_gpu,
            overrides,
        )
        (output / "head.toml").write_text(_config_text(folder, head, on_gpu), encoding="utf-8")
        if not stages.done:
            say("writing the first prompts and answers, and measuring; the plan follows")
        probe = maker.probe(minutes)
        plan = make_head_plan(probe, minutes)
        stages.fix({"minutes": minutes})
        say(_plan_text(plan, minutes, probe))
        maker.make(plan, probe, minutes)
    serve = f"{command_prefix()} serve {target} --draft {output / 'head'}"
    results = _acceptance(output / "eval" / ACCEPTANCE)["entries"]
    if output_format is OutputFormat.JSON:
        facts = {"head": str(output / "head"), "serve": serve, "minutes": stages.seconds() / 60}
        facts |= {"plan": plan.to_json(), "acceptance": results}
        print(json.dumps(facts | {"stages": [asdict(stage) for stage in stages.done]}, indent=2))
        return
    for line in _result_lines(results):
        say(line)
    say(f"done in {stages.seconds() / 60:.1f} minutes; serve it:\n  {serve}")


class _Maker:
    """The commands of the stages of a run, in the output folder."""

    def __init__(
        self,
        stages: Stages,
        output: Path,
        target: str,
        folder: Path,
        prompts: Path | None,
        head: str,
        fits_correction: bool,
        thinking: bool | None,
        longest: int,
        on_gpu: bool,
        overrides: Sequence[str],
    ) -> None:
        self._stages, self._output = stages, output
        self._target, self._folder = target, folder
        self._own_prompts, self._head, self._on_gpu = prompts, head, on_gpu
        self._fits_correction = fits_correction
        self._num_processes = 1 if prompts else _num_processes(folder, on_gpu)
        self._prompts = [prompts] if prompts else self._files("prompts")
        self._answers = self._files("answers")
        self._config, self._work = output / "head.toml", output / "make-head"
        self._longest = longest
        self._mode: list[str] = []
        if thinking is not None:
            self._mode = ["--thinking" if thinking else "--no-thinking"]
        self._overrides = [word for one in overrides for word in ("--set", one)]

    # ---- the stages ----

    def probe(self, minutes: float) -> HeadProbe:
        """Write the first prompts and answers, which the data begins with, and train on some.

        Several processes of a small target write as many as `minutes` will probably need.
        """
        count = self._num_processes * _PROBE_PROMPTS["cuda" if self._on_gpu else "cpu"]
        at_once = 256 if self._on_gpu else 16
        written, prompt_s, starts = sys.maxsize, 0.0, {}
        if self._own_prompts is None:
            written = count
            if self._num_processes > 1:
                each = _PROMPTS_A_MINUTE * (minutes - _START_MINUTES)
                wanted = int(self._num_processes * each)
                written = self._stages.fixed("first_prompts", lambda: max(count, wanted))
            stage = self._synthesize("probe of synthesize", written)
            seconds = _most_seconds(stage)
            prompt_s = seconds / max(1, _total(stage, "kept") - _total(stage, "resumed"))
            start = stage.seconds - seconds
            starts["synthesize"] = start
            # At the speed of prompts; answers are no longer than allowed.
            most_s = self._longest * seconds / max(1, _total(stage, "tokens"))
            work_s = 60 * minutes - stage.seconds - _NUM_STARTS * start
            wanted = min(written, int(_ANSWERS_SHARE * work_s / most_s))
            count = self._stages.fixed("first_answered", lambda: max(count, wanted))
        stage = self._regenerate("probe of regenerate", count)
        seconds = _most_seconds(stage)
        start = stage.seconds - seconds
        answers = max(1, _total(stage, "answers"))
        answered = round(_total(stage, "prompts"))
        answer_s = seconds / answers
        starts["regenerate"] = start
        starts["prepare"] = start  # it loads less, and has work of its own
        share = min(_EVAL_TOKENS / max(1.0, _total(stage, "tokens") / answers), 2.0)
        in_first = max(1, stage.result["answers"] + stage.result["resumed"])
        stage = self._train_probe(self._answers[0])
        trained = stage.result
        step_tokens = trained["tokens_per_step"]
        answer_tokens = step_tokens * trained["steps_per_epoch"] / in_first
        step_s = step_tokens / trained["tokens_per_s"]
        starts["train"] = stage.seconds - trained["step"] * step_s
        if self._fits_correction:
            starts["correction"] = starts["train"]
        starts["eval"] = 1.5 * start  # two engines, one target
        return HeadProbe(
            self._stages.seconds(without=_STAGES),
            starts,
            written,
            answered,
            prompt_s,
            answer_s,
            answer_tokens,
            step_s,
            step_tokens,
            2 * answer_s * self._num_processes * share * at_once / _EVAL_AT_ONCE,
            len(self._sets),
            self._fits_correction,
        )

    def make(self, plan: HeadPlan, probe: HeadProbe, minutes: float) -> None:
        """Run all stages in full; training, correction and evaluation fit into what is left."""
        if "synthesize" in plan.seconds:
            self._synthesize("synthesize", plan.prompts, self._prompts)
        if "regenerate" in plan.seconds or not all(path.is_file() for path in self._answers):
            self._regenerate("regenerate", plan.prompts, self._answers)
        stage = self._prepare()
        spent = self._stages.seconds(without=("train", "correction", "eval"))
        later = sum(plan.seconds.get(name, 0.0) for name in ("correction", "eval"))
        left = 60 * minutes - spent - probe.starts_s["train"] - later
        tokens = stage.result["tokens"]
        self._train(training_steps(left, probe.step_s, probe.step_tokens, tokens))
        if plan.correction_steps:
            spent = self._stages.seconds(without=("correction", "eval"))
            left = 60 * minutes - spent - probe.starts_s["correction"] - plan.seconds["eval"]
            steps = training_steps(left, probe.step_s, probe.step_tokens, tokens)
            self._correct(min(steps, MAX_CORRECTION_STEPS))
        left = 60 * minutes - self._stages.seconds(without=("eval",)) - probe.starts_s["eval"]
        self._eval(eval_prompts(left, plan, probe))

    # ---- their commands ----

    def _synthesize(self, name: str, count: int, outputs: Sequence[Path] = ()) -> Stage:
        words = ["data", "synthesize", "--target", self._target, "--no-speculation"]
        commands = [
            [*words, "--count", share, "--seed", str(seed), "--output", str(path)]
            for seed, (share, path) in enumerate(
                zip(self._shares(count), self._prompts, strict=True)
            )
        ]
        return self._write(name, commands, outputs)

    def _regenerate(self, name: str, count: int, outputs: Sequence[Path] = ()) -> Stage:
        words = ["--target", self._target, "--temperature", _TEMPERATURES, "--no-speculation"]
        words += ["--max-new-tokens", str(self._longest)]
        shares = self._shares(count)
        commands = [
            ["data", "regenerate", str(prompts), "--limit", share, *words, "--output", str(path)]
            for prompts, share, path in zip(self._prompts, shares, self._answers, strict=True)
        ]
        return self._write(name, commands, outputs)

    def _shares(self, count: int) -> list[str]:
        """Return the share of `count` prompts of each process."""
        number = self._num_processes
        return [str(len(range(first, count, number))) for first in range(number)]

    def _write(
        self, name: str, commands: Sequence[Sequence[str]], outputs: Sequence[Path]
    ) -> Stage:
        """Let the target write, in one process for each command."""
        more = [*self._mode, *self._memory(), "--format", "json"]
        first, *others = ([*words, *more] for words in commands)
        return self._stages.run(name, first, outputs, beside=others)

    def _memory(self) -> list[str]:
        """Return the options that let processes share a card; the first run fixes them."""
        if self._num_processes == 1:
            return []
        free_gib = self._stages.fixed("free_gib", _free_gib)
        return ["--kv-cache-gib", f"{max(1, int(_KV_SHARE * free_gib / self._num_processes))}"]

    def _files(self, name: str) -> list[Path]:
        """Return the output file of each writing process."""
        if self._num_processes == 1:
            return [self._output / f"{name}.jsonl"]
        return [self._output / f"{name}-{number}.jsonl" for number in range(self._num_processes)]

    def _prepare(self) -> Stage:
        prepared = self._output / "train.safetensors"
        words = ["data", "prepare", *map(str, self._answers), "--target", self._target]
        words += ["--output", str(prepared), "--validation-share", f"{_VALIDATION_SHARE:g}"]
        words += [*self._mode, "--max-length", "2048", "--overwrite", "--format", "json"]
        return self._stages.run(
            "prepare", words, [prepared, prepared.with_suffix(".validation.safetensors")]
        )

    def _train_probe(self, answers: Path) -> Stage:
        """Train for a short time on answers as they were written, without validation."""
        trial, config = self._work / "trial", self._work / "trial.toml"
        if self._stages.find("probe of train") is None:
            shutil.rmtree(trial, ignore_errors=True)
            text = _config_text(self._folder, self._head, self._on_gpu, answers.absolute(), None)
            config.write_text(text, encoding="utf-8")
        words = ["train", str(config), "--output", str(trial)]
        words += ["--set", f"run.minutes={_PROBE_MINUTES}", "--set", "run.log_every=1"]
        stage = self._stages.run(
            "probe of train", [*words, *self._overrides], result=partial(_trial_record, trial)
        )
        shutil.rmtree(trial, ignore_errors=True)
        return stage

    def _train(self, steps: int) -> None:
        words = ["train", str(self._config), "--set", f"optimizer.steps={steps}"]
        words += ["--set", f"run.validate_every={-(-steps // _NUM_VALIDATIONS)}"]
        words += ["--set", f"run.save_every={-(-steps // _NUM_SAVES)}", *self._overrides]
        head = self._output / "head"
        self._stages.run(
            "train",
            words,
            [head / "model.safetensors", head / "config.json"],
            result=partial(_record, self._output / "train.json"),
            going_on=_resumed(self._output),
        )

    def _correct(self, steps: int) -> None:
        words = ["train", str(self._config), "--correction-on", str(self._output / "head")]
        words += ["--set", f"correction.steps={steps}"]
        words += ["--set", f"run.validate_every={-(-steps // _NUM_VALIDATIONS)}", *self._overrides]
        folder = self._output / "correction"
        self._stages.run(
            "correction",
            words,
            [self._output / "head" / "correction.st"],
            result=partial(_record, folder / "train.json"),
            going_on=_resumed(folder),
        )

    def _eval(self, limit: int) -> None:
        # The name of a bundled target would add its own heads.
        target = str(self._folder) if pair_of(self._target) else self._target
        words = ["eval", target, "--draft", str(self._output / "head")]
        words += ["--set", ",".join(self._sets), "--limit", str(limit), *self._mode]
        words += ["--max-new-tokens", str(_EVAL_TOKENS), "--output", str(self._output / "eval")]
        results = self._output / "eval" / ACCEPTANCE
        self._stages.run("eval", words, [results], result=partial(_acceptance, results))

    @property
    def _sets(self) -> list[str]:
        """Return the evaluation sets: conversations too if the target answers in a conversation."""
        side = self._answers[0].with_suffix(".jsonl.meta.json")
        is_chat = json.loads(side.read_text(encoding="utf-8"))["options"]["chat"]
        return ["humaneval", "mt_bench"] if is_chat else ["humaneval"]


def _num_processes(folder: Path, on_gpu: bool) -> int:
    """Return the number of writing processes: several for a small target on a GPU."""
    if not on_gpu:
        return 1
    from peagle.engine.placement import usable_cores

    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not 0 < size <= _SMALL_TARGET_BYTES:
        return 1
    return max(1, min(_MAX_PROCESSES, usable_cores() // _CORES_PER_PROCESS))


def _free_gib() -> int:
    """Return the free memory of the GPU, in whole GiB."""
    import torch

    return torch.cuda.mem_get_info()[0] // 2**30


def _total(stage: Stage, name: str) -> float:
    """Return the sum of a figure over the commands of a stage."""
    return sum(result[name] for result in (stage.result, *stage.results))


def _most_seconds(stage: Stage) -> float:
    """Return the seconds of work of the slowest command of a stage, without its start."""
    return max(result["seconds"] for result in (stage.result, *stage.results))


def _check_overrides(head: str, overrides: Sequence[str]) -> bool:
    """Return whether a correction is fitted on the head that these values ask for.

    None is fitted on an EAGLE-3 head, on one of a single draft, or where it is trained together.

    Raises:
        UserError: a value is wrong; it names the key.
    """
    from peagle.training.config import TrainConfig

    for override in overrides:
        if override.partition("=")[0].strip() in _PLANNED:
            raise UserError(
                f"--set {override}: `peagle make-head` plans the steps by --minutes. Leave it out, "
                "and give other --minutes."
            )
    with TemporaryDirectory() as folder:
        config = Path(folder) / "head.toml"
        config.write_text(_config_text(Path(folder), head, False), encoding="utf-8")
        try:
            read = TrainConfig.read(config, [f"run.minutes={_PROBE_MINUTES}", *overrides])
        except UserError as error:
            text = str(error).replace(f"{str(config)!r} with ", "")
            raise UserError(text.replace(repr(str(config)), "--set")) from None
    if (on := read.correction.on) is not None:
        raise UserError(
            f"--set correction.on is {str(on)!r}; expected none: `peagle make-head` makes a head "
            "and its correction. Use `peagle train --correction-on` for one that is there."
        )
    method = read.method
    return method.name == "peagle" and method.depth > 1 and not read.correction.is_trained


def _resumed(folder: Path) -> list[str]:
    """Return the option that lets `peagle train` go on, if there is a checkpoint."""
    return ["--resume"] if (folder / "checkpoint").is_dir() else []


def _trial_record(trial: Path) -> dict[str, Any]:
    """Return the last report of a training, and the steps of an epoch."""
    lines = (trial / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    reports = [report for report in map(json.loads, lines) if report["kind"] == "train"]
    record = _record(trial / "train.json")
    return {**reports[-1], "steps_per_epoch": record["steps"] / record["epochs"]}


def _record(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text(encoding="utf-8"))
    return {name: record[name] for name in ("steps", "epochs", "seconds", "best")}


def _acceptance(file: Path) -> dict[str, Any]:
    """Return the acceptance of each method by prompt set, whole and before loops."""
    entries = read_document(file, AcceptanceResults).entries
    return {
        "entries": [
            {
                "method": entry.method,
                "k": entry.k,
                "set": name,
                "acceptance_length": part.length,
                "tokens_per_step": part.tokens_per_step or 1.0,
                "acceptance_length_before_loop": part.acceptance_length_before_loop,
            }
            for entry in entries
            for name, part in {**entry.by_set, "all": entry.pooled}.items()
        ]
    }


def _result_lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Compare the head with prompt lookup by tokens a step: lookup does not draft at every step."""
    lines = []
    for name in dict.fromkeys(entry["set"] for entry in entries):
        rows = [entry for entry in entries if entry["set"] == name]
        ours = next(entry for entry in rows if entry["method"] != NGRAM)
        lookup = next(entry for entry in rows if entry["method"] == NGRAM)
        head, other = ours["tokens_per_step"], lookup["tokens_per_step"]
        verdict = "better than" if head > other else "no better than"
        before = ours["acceptance_length_before_loop"]
        early = "" if before is None else f"; before an output loops {before:.2f}"
        lines.append(
            f"{name}: {head:.2f} tokens a step, {verdict} prompt lookup ({other:.2f}){early}"
        )
    return lines


def _plan_text(plan: HeadPlan, minutes: float, probe: HeadProbe) -> str:
    rows = plan.rows()
    total = sum(minutes for _, minutes, _ in rows)
    lines = [f"plan for {minutes:g} minutes:"]
    lines += [f"  {name:<12}{minutes:>6.1f} min  {work}".rstrip() for name, minutes, work in rows]
    speeds = (
        f"measured: {1 / probe.answer_s:,.1f} answers/s, "
        f"{probe.step_tokens / probe.step_s:,.0f} tokens/s of training"
    )
    return "\n".join([*lines, f"  {'all':<12}{total:>6.1f} min  {speeds}"])


def _config_text(
    target: Path,
    head: str,
    on_gpu: bool,
    train: Path = Path("train.safetensors"),
    validation: Path | None = Path("train.validation.safetensors"),
) -> str:
    """Return the training configuration; steps and intervals are options of the commands."""
    is_parallel = head == "peagle"
    measured = "" if validation is None else f"validation = {json.dumps(str(validation))}\n"
    return f"""\
# Written by `peagle make-head`, whose commands add the number of steps. Paths are relative to this
# file.
target = {json.dumps(str(target.absolute()))}
output = "."

[head]
num_layers = {4 if is_parallel else 1}

[data]
train = {json.dumps(str(train))}
{measured}max_length = 2048
batch_tokens = {32768 if on_gpu else 1024}
length_multiple = {128 if on_gpu else 64}

[method]
name = "{head}"
depth = 8
cod_ratio = 0.7
cod_floor = 0.2

[optimizer]
name = "muon"
learning_rate = 5e-3
warmup_ratio = {0.02 if on_gpu else 0.05}

[run]
validation_temperature = 0.0
log_every = {20 if on_gpu else 5}
"""
