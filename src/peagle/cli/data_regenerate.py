"""`peagle data regenerate`: prompts to responses of the target."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import groups
from peagle.cli.flags import Given, pick, takes
from peagle.cli.options import ChatTemplate, Format, OutputFormat, Split
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import Layer, Setting
from peagle.cli.setup import Setup, note
from peagle.config import require_writable_file
from peagle.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peagle.training.readers import AskedConversation
    from peagle.training.regenerate import Answerer, RegenerateProgress

EXAMPLES = """
By the target in this process, with a head that makes it faster:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data regenerate prompts.parquet --target ./Qwen3-0.6B --draft ./head --temperature 0.7 \\
      --no-thinking --max-new-tokens 4096 --output responses.jsonl

By any server with OpenAI's interface; the variable PEAGLE_API_KEY holds its key:
  peagle data regenerate prompts.jsonl --endpoint http://127.0.0.1:8000 --concurrency 64 \\
      --output responses.jsonl

Interrupted? The same command again goes on where it was.
"""
_MAX_TOKENS = 2048


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *groups.SAMPLING,
    *groups.FINER_SAMPLING,
    *groups.ENGINE,
    *pick(groups.SETTINGS, "config", "show_memory"),
)
def regenerate(
    given: Given,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".jsonl, .parquet, a folder of .parquet files or one that Hugging Face datasets "
            'wrote (save_to_disk), with {"id", "turns"}, {"id", "messages"} (answers in them are '
            'left out) or {"id", "prompt"}; or plain text, a prompt a line.',
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSONL file, to which answers are added.")
    ],
    split: Split = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a server with OpenAI's interface; --target is then the model's name there.",
            show_default="the target in this process",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Questions that the endpoint has at a time.")
    ] = 16,
    retries: Annotated[
        int, typer.Option(help="Further tries where the endpoint fails or is busy.")
    ] = 6,
    timeout: Annotated[float, typer.Option(help="Seconds that one try may take.")] = 600.0,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Thinking mode of the chat template.",
            show_default="the template's",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer in a conversation, or complete the first turn as it stands.",
            show_default="chat if there is a template",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take only the first so many prompts.")
    ] = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Let the target answer prompts: the text that its heads are trained on.

    Answers are written as they come, and those that are there already are not asked for again.
    Equal prompts are asked once. Each prompt has a seed of its own that depends on nothing but
    --seed and the conversation. Beside the output, OUTPUT.meta.json tells where it comes from.
    """
    if output.suffix != ".jsonl":
        raise UserError(f"--output is {str(output)!r}; expected a name that ends in .jsonl.")
    require_writable_file(output, "--output")
    setup = Setup.of(given, Layer({"sampling.max_tokens": Setting(_MAX_TOKENS, "default")}))
    if setup.params.n != 1:
        raise UserError(f"n is {setup.params.n}; a prompt has one response. Leave n out.")
    if endpoint is None:
        setup.check_paths(chat_template)
    from peagle.training.tables import is_folder, sha256_of_table, split_of

    prompts = split_of(prompts, split)
    dialogues = list(islice(_dialogues(prompts), limit))
    shape = {"thinking": thinking, "chat_template": _template_id(chat_template)}
    with ProgressLine("answer") as progress:
        if endpoint is None:
            progress.begin("loading the model")
            answerer, facts = _local(setup, chat, chat_template, thinking)
        else:
            _check_remote(given, chat_template)
            connection = {"concurrency": concurrency, "retries": retries, "timeout": timeout}
            answerer, facts = _remote(setup, endpoint, chat, thinking, connection)
        if not answerer.is_chat and (further := sum(len(d.turns) > 1 for d in dialogues)):
            note(
                f"{further} of {len(dialogues)} prompts have further turns: only the first is used"
            )
        from peagle.environment import environment
        from peagle.training import regenerate as library

        seed = setup.params.seed or 0
        options = {
            "model": facts.pop("model"),
            "chat": answerer.is_chat,
            **shape,
            "sampling": _sampling(setup),
            "seed": seed,
        }
        # A setting of a file or a variable may be no JSON.
        options = json.loads(json.dumps(options, default=str))
        is_stored = prompts.is_file() or is_folder(prompts)  # not standard input or a pipe
        facts |= {
            "prompts_sha256": sha256_of_table(prompts) if is_stored else None,
            "command": " ".join(sys.argv[1:]),
        }
        facts |= environment(facts.pop("device", None))
        done = library.regenerate(
            dialogues, answerer, output, options, facts, seed=seed, watch=partial(_show, progress)
        )
    _finish(done, output, output_format)


def _dialogues(file: Path) -> Iterator[AskedConversation]:
    from peagle.evaluation.prompts import read_prompts
    from peagle.training.readers import AskedConversation, dialogue_of, read_records
    from peagle.training.tables import is_folder

    if file.suffix in (".jsonl", ".parquet") or is_folder(file):
        found = False
        for record in read_records(file):
            found = True
            yield dialogue_of(record)
        if not found:
            raise UserError(f"{str(file)!r} has no prompts: it is empty.")
        return
    for prompt in read_prompts(file):
        yield AskedConversation(prompt.id, prompt.turns)


def _local(
    setup: Setup, chat: bool | None, chat_template: str | None, thinking: bool | None
) -> tuple[Answerer, dict[str, Any]]:
    llm = setup.load()
    from peagle.training.local_answers import LocalAnswerer
    from peagle.training.readers import tokenizer_sha256

    if chat is None:
        chat = chat_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))
    if not chat and (chat_template is not None or thinking):
        raise UserError("--raw uses no chat template; leave --chat-template and --thinking out.")
    answerer = LocalAnswerer(
        llm, setup.params, is_chat=chat, chat_template=chat_template, thinking=thinking
    )
    facts = {
        "model": Path(llm.target.name).name,
        "tokenizer_sha256": tokenizer_sha256(llm.target.name, llm.tokenizer),
        "device": llm.target.device,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
    }
    return answerer, facts


def _remote(
    setup: Setup,
    endpoint: str,
    chat: bool | None,
    thinking: bool | None,
    connection: dict[str, Any],
) -> tuple[Answerer, dict[str, Any]]:
    from peagle.client.api import KEY_VARIABLE, key_from_environment
    from peagle.client.fields import sampling_fields
    from peagle.training.endpoint_answers import EndpointAnswerer, Patience

    fields = sampling_fields(setup.params, _sampling(setup))
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    patience = Patience(connection["retries"], timeout_s=connection["timeout"])
    answerer = EndpointAnswerer(
        endpoint,
        setup.settings.value("target"),
        fields,
        key=key_from_environment(KEY_VARIABLE),
        concurrency=connection["concurrency"],
        is_chat=chat is not False,
        patience=patience,
    )
    return answerer, {"model": answerer.model, "endpoint": endpoint}


def _sampling(setup: Setup) -> dict[str, Any]:
    """What was asked of sampling; the seed stands apart, and n is always 1."""
    given = setup.settings.section("sampling")
    return {key: value for key, value in given.items() if key not in ("seed", "n")}


def _check_remote(given: Given, chat_template: str | None) -> None:
    """Refuse what would have no effect on a server.

    Raises:
        UserError: naming it.
    """
    here = ("engine.", "speculative", "no_speculation", "revision", "threads", "show_memory")
    idle = [setting.source for key, setting in given.items() if key.startswith(here)]
    idle += ["--chat-template"] if chat_template is not None else []
    if idle:
        raise UserError(f"{idle[0]} has no effect on a server (--endpoint); leave it out.")


def _template_id(chat_template: str | None) -> str | None:
    """What tells templates apart: the name, and of a file the hash."""
    if chat_template is None or not Path(chat_template).is_file():
        return chat_template
    from peagle.training.provenance import sha256_of

    return sha256_of(Path(chat_template))


def _show(line: ProgressLine, progress: RegenerateProgress) -> None:
    there = progress.resumed + progress.answers
    speed = f"{_speed(progress):,.0f} tokens/s" if progress.tokens else ""
    line.update(there, there + progress.waited_for, speed, line=_told(progress))


def _speed(progress: RegenerateProgress) -> float:
    return progress.tokens / progress.seconds if progress.seconds else 0.0


def _told(progress: RegenerateProgress) -> str:
    parts = [f"{progress.answers} answers to {progress.prompts} prompts"]
    parts += [f"{progress.resumed} were there"] if progress.resumed else []
    parts += [f"{progress.duplicates} duplicates"] if progress.duplicates else []
    parts += [f"{progress.cut} cut off"] if progress.cut else []
    parts += [f"{len(progress.failures)} failed"] if progress.failures else []
    return ", ".join(parts) + (
        f"; {progress.tokens} tokens in {progress.seconds:.1f} s ({_speed(progress):.1f} tokens/s)"
    )


def _finish(progress: RegenerateProgress, output: Path, output_format: OutputFormat) -> None:
    """Tell what was done.

    Raises:
        UserError: questions failed.
    """
    if output_format is OutputFormat.JSON:
        print(json.dumps(asdict(progress) | {"output": str(output)}))
    else:
        print(f"{output}: {_told(progress)}")
    if progress.failures:
        name, reason = next(iter(progress.failures.items()))
        raise UserError(
            f"{len(progress.failures)} of {progress.prompts} prompts have no whole answer; the "
            f"first, {name!r}: {reason} The same command asks for them again."
        )
