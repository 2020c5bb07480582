"""`peagle data regenerate`: the target's answers to prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli import groups
from peagle.cli.data_answers import (
    answer_speed,
    begin_output,
    check_jsonl,
    flag_for_answers,
    given_sampling,
    load_for_batches,
    print_counts,
    template_id,
)
from peagle.cli.data_prepare import print_dropped
from peagle.cli.flags import Given, pick_flags, spread, takes
from peagle.cli.groups import ChatTemplate, Format, OutputFormat, Split
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import Layer, Setting
from peagle.cli.setup import Setup, note
from peagle.data.readers import (
    AskedConversation,
    DropCounts,
    Dropped,
    dialogue_of,
    is_folder,
    read_records,
    sha256_of_table,
    split_of,
)
from peagle.environment import environment
from peagle.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from peagle.data.regenerate import Answerer, CallFinder, RegenerateProgress

REGENERATE_EXAMPLES = """
By the target in this process, with a head that makes it faster:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data regenerate prompts.parquet --target ./Qwen3-0.6B --draft ./head --temperature 0.7 \\
      --no-thinking --max-new-tokens 4096 --output responses.jsonl

Half of the prompts are answered greedily, half are sampled:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --temperature 0,0.7 \\
      --output responses.jsonl

By any server with OpenAI's interface; the variable PEAGLE_API_KEY holds its key:
  peagle data regenerate prompts.jsonl --endpoint http://127.0.0.1:8000 --concurrency 64 \\
      --output responses.jsonl

Interrupted? The same command again goes on where it was.
"""
_MAX_TOKENS = 2048
_RAW_HAS_NO_TEMPLATE = "--raw uses no chat template; leave --chat-template and --thinking out."


@dataclass(frozen=True, slots=True)
class RegenerateOptions:
    """The options of `peagle data regenerate`, as typed."""

    prompts: Path = typer.Argument(
        ...,
        metavar="FILE",
        help=".jsonl, .parquet, a folder of .parquet files or one that Hugging Face datasets "
        'wrote (save_to_disk), with {"id", "turns"}, {"id", "messages"} (answers in them are '
        "left out, but for those that results of tools follow; tools are asked with) or "
        '{"id", "prompt"}; or plain text, a prompt a line.',
    )
    output: Path = typer.Option(..., "--output", "-o", help="JSONL file that receives the answers.")
    split: Split = None
    endpoint: str | None = typer.Option(
        None,
        metavar="URL",
        help="Ask a server with OpenAI's interface; --target is then the model's name there.",
        show_default="the target in this process",
    )
    concurrency: int = typer.Option(16, help="Number of questions in flight at the endpoint.")
    retries: int = typer.Option(6, help="Number of further tries if the endpoint fails or is busy.")
    timeout: float = typer.Option(600.0, help="Longest time of one try in seconds.")
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template.",
        show_default="the template's",
    )
    chat_template: ChatTemplate = None
    chat: bool | None = typer.Option(
        None,
        "--chat/--raw",
        help="Answer in a conversation, or complete the first turn as it stands.",
        show_default="chat if there is a template",
    )
    limit: int | None = typer.Option(None, min=1, help="Largest number of prompts, from the first.")
    output_format: Format = OutputFormat.TEXT


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *map(flag_for_answers, (*groups.SAMPLING, *groups.FINER_SAMPLING, *groups.ENGINE)),
    *pick_flags(groups.SETTINGS, "config", "show_memory"),
)
@spread
def regenerate(given: Given, options: RegenerateOptions) -> None:
    """Let the target answer prompts: its heads are trained on the answers.

    The command writes each answer at once, and skips questions that the output already answers. It
    asks equal prompts once. The seed of a question depends only on --seed and the conversation.
    OUTPUT.meta.json beside the output holds the provenance. The command counts left-out prompts by
    reason.
    """
    done = _regenerate(options, _plan_answers(given, options))
    if options.output_format is OutputFormat.JSON:
        print_counts(done, options.output)
    else:
        print(f"{options.output}: {_summary(done)}")
        print_dropped(done)
    if done.failures:
        name, reason = next(iter(done.failures.items()))
        raise UserError(
            f"{len(done.failures)} of {done.prompts} prompts have no whole answer; the "
            f"first, {name!r}: {reason} The same command asks for them again."
        )


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """The prompts to answer and the settings of the answers.

    Attributes:
        prompts: the table of the prompts.
        found: the dialogues to ask, and records that are left out.
        temperatures: several temperatures, of which each question gets one, else (None,).
        known: the settings that decide the answers, as JSON, without the model.
    """

    setup: Setup
    prompts: Path
    found: list[AskedConversation | Dropped]
    temperatures: tuple[float | None, ...]
    known: dict[str, Any]


def _plan_answers(given: Given, options: RegenerateOptions) -> AnswersPlan:
    """Check the options and the output, and read the prompts."""
    chat_template, thinking = options.chat_template, options.thinking
    check_jsonl(options.output)
    temperatures: tuple[float, ...] = given.value("sampling.temperature", ())
    if temperatures:
        source = given["sampling.temperature"].source
        given["sampling.temperature"] = Setting(temperatures[0], source)
    setup = Setup(given, Layer({"sampling.max_tokens": Setting(_MAX_TOKENS, "default")}))
    if setup.params.n != 1:
        raise UserError(f"n is {setup.params.n}; a prompt has one response. Leave n out.")
    if options.endpoint is None:
        setup.check_paths(chat_template)
        if options.chat is False and (chat_template is not None or thinking):
            raise UserError(_RAW_HAS_NO_TEMPLATE)
    else:
        _check_remote(given, chat_template)
    prompts = split_of(options.prompts, options.split)
    found = list(_first_dialogues(prompts, options.limit))
    are_several = len(temperatures) > 1
    at = {"temperature": temperatures} if are_several else {}
    deciding = {
        "thinking": thinking,
        "chat_template": template_id(chat_template),
        "sampling": given_sampling(setup) | at,
        "seed": setup.params.seed or 0,
    }
    known = begin_output(options.output, deciding)
    return AnswersPlan(setup, prompts, found, temperatures if are_several else (None,), known)


def _regenerate(options: RegenerateOptions, plan: AnswersPlan) -> RegenerateProgress:
    """Ask the questions that the output does not answer yet, of the target here or of a server."""
    with ProgressLine("answer") as progress:
        if options.endpoint is None:
            progress.begin("loading the model")
            answerer, facts = _local(plan.setup, options)
        else:
            answerer, facts = _remote(plan.setup, options, options.endpoint)
        if not answerer.is_chat:
            dialogues = [one for one in plan.found if isinstance(one, AskedConversation)]
            further = sum(bool(d.turns[1:] or d.system or d.tools) for d in dialogues)
            if further:
                note(
                    f"{further} of {len(dialogues)} prompts have further turns, system messages or "
                    "tools: only the first message of the user is used"
                )
        from peagle.data import regenerate as library
        from peagle.data.origins import read_prompt_origin

        deciding = {"model": facts.pop("model"), "chat": answerer.is_chat, **plan.known}
        prompts = plan.prompts
        is_stored = prompts.is_file() or is_folder(prompts)  # not standard input or a pipe
        origin = read_prompt_origin(prompts) if is_stored else None
        facts |= {
            "prompts_sha256": sha256_of_table(prompts) if is_stored else None,
            "prompts": origin and origin.model_dump(),
            "command": " ".join(sys.argv[1:]),
        }
        facts |= environment(facts.pop("device", None))
        return library.regenerate(
            plan.found,
            answerer,
            options.output,
            deciding,
            facts,
            temperatures=plan.temperatures,
            seed=plan.known["seed"],
            watch=partial(_show_answers, progress),
        )


def _first_dialogues(file: Path, limit: int | None) -> Iterator[AskedConversation | Dropped]:
    """Yield the first prompts of a file, and the records left out before the last of them.

    The detail of a left-out record begins with its place.

    Raises:
        UserError: the file has no prompt.
    """
    from peagle.evaluation.prompts import read_prompts

    if file.suffix not in (".jsonl", ".parquet") and not is_folder(file):
        for prompt in read_prompts(file)[:limit]:
            yield AskedConversation(prompt.id, prompt.turns)
        return
    counts, number = DropCounts(), 0
    for record in read_records(file):
        made = dialogue_of(record)
        if isinstance(made, Dropped):
            counts.drop(made, record.where)
            detail = f"{record.where}: {made.detail}" if made.detail else record.where
            yield Dropped(made.reason, detail)
            continue
        yield made
        number += 1
        if number == limit:
            return
    if not number:
        why = "; ".join(counts.reasons()) or "it is empty"
        raise UserError(f"{str(file)!r} has no prompts: {why}.")


def _local(setup: Setup, options: RegenerateOptions) -> tuple[Answerer, dict[str, Any]]:
    llm, facts = load_for_batches(setup)
    from peagle.data.regenerate import LocalAnswerer

    chat, chat_template, thinking = options.chat, options.chat_template, options.thinking
    if chat is None:
        chat = chat_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))
    if not chat and (chat_template is not None or thinking):
        raise UserError(_RAW_HAS_NO_TEMPLATE)
    answerer = LocalAnswerer(
        llm,
        setup.params,
        is_chat=chat,
        chat_template=chat_template,
        thinking=thinking,
        call_finder=call_finder(llm.tokenizer, chat_template) if chat else None,
    )
    return answerer, facts


def call_finder(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> CallFinder:
    """Return a finder of tool calls in the form that the server expects for the chat template."""
    from peagle.chat import resolve_chat_template
    from peagle.data.regenerate import CallFinder
    from peagle.serving.tool_parsers import PARSERS, detect_parser, parser_for
    from peagle.serving.tools import message_from

    kind = detect_parser(resolve_chat_template(tokenizer, chat_template, with_tools=True))

    def find(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[dict]]:
        content, calls = message_from(parser_for(kind, tools).add(text, final=True))
        # A server's random ids would make each run differ; some templates want nine characters.
        return content, [{**call, "id": f"call{i:05}"} for i, call in enumerate(calls, 1)]

    return CallFinder(PARSERS[kind].markers, find)


def _remote(
    setup: Setup, options: RegenerateOptions, endpoint: str
) -> tuple[Answerer, dict[str, Any]]:
    from peagle.client.api import KEY_VARIABLE, key_from_environment
    from peagle.client.fields import sampling_fields
    from peagle.data.regenerate import EndpointAnswerer, Patience

    fields = sampling_fields(setup.params, given_sampling(setup))
    if options.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    patience = Patience(options.retries, timeout_s=options.timeout)
    answerer = EndpointAnswerer(
        endpoint,
        setup.settings.value("target"),
        fields,
        key=key_from_environment(KEY_VARIABLE),
        concurrency=options.concurrency,
        is_chat=options.chat is not False,
        patience=patience,
    )
    return answerer, {"model": answerer.model, "endpoint": endpoint}


def _check_remote(given: Given, chat_template: str | None) -> None:
    """Refuse options that have no effect on a server."""
    here = ("engine.", "speculative", "no_speculation", "revision", "threads", "show_memory")
    idle = [setting.source for key, setting in given.items() if key.startswith(here)]
    idle += ["--chat-template"] if chat_template is not None else []
    if idle:
        raise UserError(f"{idle[0]} has no effect on a server (--endpoint); leave it out.")


def _summary(progress: RegenerateProgress) -> str:
    parts = [f"{progress.answers} answers to {progress.prompts} prompts"]
    parts += [f"{progress.resumed} were there"] if progress.resumed else []
    parts += [f"{progress.duplicates} duplicates"] if progress.duplicates else []
    parts += [f"{progress.cut} cut off"] if progress.cut else []
    ended = progress.ended_by_calls
    parts += [f"{ended} conversations ended by a tool call without a result"] if ended else []
    parts += [f"{dropped} dropped"] if (dropped := progress.dropped.total()) else []
    parts += [f"{len(progress.failures)} failed"] if progress.failures else []
    return ", ".join(parts) + (
        f"; {progress.tokens} tokens in {progress.seconds:.1f} s "
        f"({answer_speed(progress):.1f} tokens/s)"
    )


def _show_answers(line: ProgressLine, progress: RegenerateProgress) -> None:
    there = progress.resumed + progress.answers
    speed = f"{answer_speed(progress):,.0f} tokens/s" if progress.tokens else ""
    line.update(there, there + progress.waited_for, speed, line=_summary(progress))
