"""A conversation with a model: its turns, its commands, the models that answer, the screens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.chat import opens_thinking, render_chat, resolve_chat_template
from peagle.cli.tally import Tally, drafts_of
from peagle.cli.terminal import bright, dim, has_styles, printable, safe
from peagle.client.answers import AnswerEvent, DraftReport
from peagle.client.api import ApiClient
from peagle.client.fields import served_drafts
from peagle.config import SamplingParams
from peagle.config.checks import near_names
from peagle.errors import UserError
from peagle.evaluation.endpoint_answers import stats_of
from peagle.llm import LLM, RequestOutput
from peagle.markers import marker_token_ids, unmarked
from peagle.thinking import AnswerSplitter, Piece, ThinkingSplitter, family_splitter

Messages = list[dict[str, Any]]

HELP = """
/new        forget the conversation
/undo       take back the last turn
/stats      tokens, speed, drafts, and how full the context is
/save FILE  write the conversation as JSON
/exit       leave; Ctrl-D does the same
/help       this list
//text      say something that begins with a slash
Ctrl-C stops an answer; what there is of it stays in the conversation.
""".strip()


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of the user with the model's answer.

    Attributes:
        reasoning: text that a thinking model wrote before the answer.
        answer: text of the answer.
        facts: figures of the finished request, for JSON; None if the answer was stopped.
        num_prompt_tokens: tokens of the conversation before the answer.
        num_cached_tokens: prompt tokens whose keys and values were cached.
        tally: tokens, drafts and seconds of the conversation.
        ended: "stop", "length", "context" (it is full) or "interrupt".
    """

    reasoning: str
    answer: str
    facts: dict[str, Any] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    tally: Tally
    ended: str

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the conversation with this answer."""
        return self.num_prompt_tokens + self.tally.num_tokens


class Conversation:
    """The messages between a user and a model.

    Attributes:
        messages: the conversation so far.
        turns: the turns of the conversation.
        answered: all turns, including those taken back or forgotten.
        is_over: the user wants to leave.
    """

    def __init__(self, model: LocalModel | RemoteModel, system: str | None = None) -> None:
        self.model = model
        self.system: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.messages: Messages = list(self.system)
        self.turns: list[Turn] = []
        self.answered: list[Turn] = []
        self.is_over = False

    def say(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Send the user's text, yield the answer as it comes, and add both to the conversation.

        A request that is stopped before its answer begins adds neither.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        turn = yield from self.model.answer(messages, stopped)
        self.answered.append(turn)
        if turn.answer or turn.ended != "interrupt":
            self.turns.append(turn)
            self.messages = [*messages, {"role": "assistant", "content": turn.answer}]

    @property
    def last(self) -> Turn:
        """Return the latest turn."""
        return self.answered[-1]

    def command(self, line: str) -> str:
        """Run a slash command and return its output."""
        name, _, argument = line.strip().partition(" ")
        commands: dict[str, Callable[[], str]] = {
            "/new": self.new,
            "/undo": self.undo,
            "/stats": self.stats,
            "/save": lambda: self.save(argument.strip()),
            "/exit": self.exit,
            "/help": lambda: HELP,
        }
        if name not in commands:
            near = near_names(name, commands)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"There is no command {name!r}; {hint}/help lists them. To say it to the model, "
                "begin with two slashes."
            )
        if argument.strip() and name != "/save":
            raise UserError(f"{name} stands alone; {argument.strip()!r} was given beside it.")
        return commands[name]()

    def new(self) -> str:
        """Forget all turns; the system message stays."""
        self.messages, self.turns = list(self.system), []
        return "A new conversation."

    def undo(self) -> str:
        """Take back the last message of the user and its answer."""
        if not self.turns:
            raise UserError("There is no turn to take back.")
        self.turns.pop()
        *self.messages, question, _ = self.messages
        text = question["content"]
        return f"Took back: {text if len(text) <= 60 else f'{text[:57]}...'}"

    def exit(self) -> str:
        """End the conversation."""
        self.is_over = True
        return ""

    def save(self, file: str) -> str:
        """Write the messages into a new file."""
        if not file:
            raise UserError("/save needs the name of a file, like /save chat.json.")
        path = Path(file).expanduser()
        try:
            with path.open("x", encoding="utf-8") as stream:
                json.dump({"messages": self.messages}, stream, ensure_ascii=False, indent=2)
                stream.write("\n")
        except FileExistsError:
            raise UserError(f"{file!r} is there already; name a file that is not.") from None
        except OSError as error:
            raise UserError(f"{file!r} cannot be written: {error.strerror}.") from None
        return f"Saved {len(self.messages)} messages to {file}"

    def stats(self) -> str:
        """Return tokens, speed and drafts of all answers, and how full the context is."""
        total = Tally()
        for turn in self.answered:
            total.add(turn.tally)
        drafting = total.drafting(self.model.num_speculative_tokens)
        cached = sum(turn.num_cached_tokens for turn in self.answered)
        prompts = sum(turn.num_prompt_tokens for turn in self.answered)
        used = self.turns[-1].num_tokens if self.turns else 0
        return (
            f"answers: {len(self.answered)}, {total.num_tokens} tokens, "
            f"{total.tokens_per_s:.1f} tokens/s, {drafting}\n"
            f"prompts: {cached} of {prompts} tokens were cached\n"
            f"context: {used} of {self.model.max_model_len} tokens"
        )


class LocalModel:
    """A model in this process that answers conversations; `render_chat` gets `template_options`."""

    def __init__(self, llm: LLM, params: SamplingParams, **template_options: Any) -> None:
        self.llm = llm
        self.params = params
        self.template_options = template_options
        self.max_tokens = params.max_tokens
        self.max_model_len = llm.engine.max_model_len
        self.num_speculative_tokens = drafts_of(llm)

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer as it comes, and return its turn; `stopped` may end the answer early."""
        prompt = render_chat(self.llm.tokenizer, messages, **self.template_options)
        if len(prompt) >= self.max_model_len:
            raise UserError(
                f"With this message the conversation has {len(prompt)} tokens, and the context of "
                f"{self.max_model_len} has no room for an answer. Take turns back with /undo, "
                "begin anew with /new, or start with a larger --max-model-len."
            )
        splitter = self._splitter(opened=opens_thinking(self.llm.tokenizer, prompt))
        markers = marker_token_ids(self.llm.tokenizer, splitter.markers)
        params = replace(self.params, marker_token_ids=markers)
        texts = {True: "", False: ""}

        def read(text: str, *, final: bool) -> Iterator[Piece]:
            for piece in splitter.add(text, final=final):
                piece = replace(piece, text=unmarked(piece.text))
                texts[piece.is_reasoning] += piece.text
                yield piece

        tally, output = Tally(), None
        with closing(tally.watch(self.llm.stream([prompt], params))) as chunks:
            for chunk in chunks:
                output = chunk.output
                yield from read(chunk.text, final=output is not None)
                if output is None and stopped():
                    yield from read("", final=True)
                    break
        reasoning, answer = texts[True], texts[False]
        facts = None
        if output is not None:
            facts = replace(output, text=unmarked(output.text)).to_json()
        num_cached = 0 if output is None else output.num_cached_tokens
        ended = self._ended(output, len(prompt) + tally.num_tokens)
        return Turn(reasoning, answer, facts, len(prompt), num_cached, tally, ended)

    def _splitter(self, *, opened: bool) -> AnswerSplitter:
        template = self.template_options.get("chat_template")
        source = resolve_chat_template(self.llm.tokenizer, template)
        return family_splitter(source) or ThinkingSplitter(opened=opened)

    def _ended(self, output: RequestOutput | None, num_tokens: int) -> str:
        if output is None:
            return "interrupt"
        is_full = num_tokens >= self.max_model_len
        return "context" if output.finish_reason == "length" and is_full else output.finish_reason


@dataclass(frozen=True, slots=True)
class ReportedPiece(Piece):
    """New text with a mark on each token that came from a draft.

    Attributes:
        tokens: the text of each token and whether it was accepted from a draft; empty if the
            server does not report it.
    """

    tokens: tuple[tuple[str, bool], ...] = ()


class RemoteModel:
    """A model of a server that answers conversations.

    Attributes:
        name: name of the model, printable.
        max_tokens: most tokens of an answer; 0 if the server decides.
        max_model_len: most tokens of a conversation; 0 if the server does not report it.
        num_speculative_tokens: K; 0 without drafts.
    """

    def __init__(
        self,
        server: ApiClient,
        name: str | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.server = server
        facts = _pick(server, name)
        self.name: str = printable(str(facts["id"]))
        self._request = {"model": facts["id"], **(fields or {})}
        self._request |= {"stream": True, "stream_options": {"include_usage": True}}
        self.max_tokens: int = self._request.get("max_tokens", 0)
        length = facts.get("max_model_len")
        self.max_model_len: int = length if isinstance(length, int) else 0
        most = served_drafts(facts)
        if num_speculative_tokens and not 0 < num_speculative_tokens <= (most or 0):
            raise UserError(
                f"-k is {num_speculative_tokens}; {self.name} on {server.url} drafts "
                f"{f'at most {most} tokens a step' if most else 'nothing'}."
            )
        self.num_speculative_tokens = most or 0
        if most is not None:
            # Other servers may refuse a field that they do not know.
            speculation: dict[str, Any] = {"report": True}
            if num_speculative_tokens is not None:
                self.num_speculative_tokens = num_speculative_tokens
                speculation["num_speculative_tokens"] = num_speculative_tokens
            self._request["speculation"] = speculation

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer as it comes, and return its turn."""
        answer = _RemoteAnswer()
        request = {**self._request, "messages": messages}
        with closing(self.server.events("/v1/chat/completions", request)) as events:
            start = time.perf_counter()
            for event in events:
                answer.tally.seconds += time.perf_counter() - start
                if event is not None:
                    yield from answer.add(event)
                if answer.finish_reason is None and stopped():
                    return answer.turn("interrupt")
                start = time.perf_counter()
        if answer.finish_reason is None:
            raise UserError(f"{self.server.url} ended the answer without a reason. Try again.")
        is_full = answer.num_prompt_tokens + answer.tally.num_tokens >= self.max_model_len > 0
        is_context = answer.finish_reason == "length" and is_full
        return answer.turn("context" if is_context else answer.finish_reason)


def _pick(server: ApiClient, name: str | None) -> dict[str, Any]:
    """Return the facts of the named or first model; refuse one without a chat template."""
    listed = {str(facts["id"]): facts for facts in server.models()}
    if not listed or (name is not None and name not in listed):
        names = printable(", ".join(listed)) or "none"
        raise UserError(f"{server.url} has no model {name or ''!r}; it has: {names}.")
    facts = next(iter(listed.values())) if name is None else listed[name]
    if facts.get("chat") is False:
        raise UserError(
            f"{printable(str(facts['id']))!r} on {server.url} has no chat template, so it is no "
            "chat model. Serve one that has, or start the server with a template for it."
        )
    return facts


class _RemoteAnswer:
    """The part of an answer that the server has sent."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.finish_reason: str | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._texts = {True: "", False: ""}
        self._first_s: float | None = None

    def add(self, event: AnswerEvent) -> Generator[Piece]:
        """Add a chunk to the answer and yield its text."""
        report = event.report or DraftReport()
        drafts = report.num_drafted, report.num_accepted, report.draft_depth, report.text_from
        self.tally.stats.record(*drafts)
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            for text, is_reasoning in ((choice.reasoning, True), (choice.text, False)):
                if text:
                    self._first_s = self._first_s or self.tally.seconds
                    self._texts[is_reasoning] += text
                    yield ReportedPiece(text, is_reasoning, report.tokens)
        # The usage replaces this count; without reports, a chunk is taken for a token.
        self.tally.num_tokens += len(report.tokens) or bool(event.choices)
        if usage := event.usage:
            self.num_prompt_tokens = usage.num_prompt_tokens
            if usage.num_tokens is not None:
                self.tally.num_tokens = usage.num_tokens
            self.num_cached_tokens = usage.num_cached_tokens
            self.tally.stats = stats_of(usage.drafts) or self.tally.stats

    def turn(self, ended: str) -> Turn:
        """Return the answer so far as a turn."""
        answer, stats = self._texts[False], self.tally.stats
        facts = {
            "text": answer,
            "finish_reason": self.finish_reason,
            **stats.to_json(),
            "acceptance_length": stats.acceptance_length,
            "num_cached_tokens": self.num_cached_tokens,
            "time_to_first_token_s": self._first_s or self.tally.seconds,
            "elapsed_s": self.tally.seconds,
        }
        return Turn(
            reasoning=self._texts[True].strip(),
            answer=answer,
            facts=None if ended == "interrupt" else facts,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            tally=self.tally,
            ended=ended,
        )


class JsonScreen:
    """Prints one JSON object a message, for a program."""

    def show(self, piece: Piece) -> None:
        """Print nothing: the object comes at the end."""

    def end(self, conversation: Conversation) -> None:
        """Print the conversation's last answer."""
        turn = conversation.last
        assert turn.facts is not None
        record = {
            "turn": len(conversation.turns),
            "answer": turn.answer,
            "reasoning": turn.reasoning,
            **turn.facts,
            "num_prompt_tokens": turn.num_prompt_tokens,
        }
        print(json.dumps(record), flush=True)

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """Print the reason why a message got no answer: a waiting program expects an object."""
        record = {"turn": len(conversation.turns) + 1, "error": problem}
        print(json.dumps(record), flush=True)


class TextScreen:
    """Prints answers as they come, separate from the reasoning, and figures after each."""

    def __init__(self, is_live: bool) -> None:
        self._is_live = is_live
        self._aside = sys.stdout if is_live else sys.stderr
        self._is_thinking = False

    def show(self, piece: Piece) -> None:
        """Print new text of an answer."""
        if piece.is_reasoning and not self._is_thinking:
            self._is_thinking = True
            self._label("thinking:")
        elif self._is_thinking and not piece.is_reasoning:
            self._end_thinking()
            if self._is_live:
                self._label("answer:")
        if piece.is_reasoning:
            print(dim(safe(piece.text, self._aside), self._aside), end="", file=self._aside)
            self._aside.flush()
        else:
            print(_marked(piece), end="", flush=True)

    def end(self, conversation: Conversation) -> None:
        """End the line, and print the figures."""
        if self._is_thinking:
            self._end_thinking()
        if not self._is_live or conversation.last.answer:
            print(flush=True)
        print(dim(f"[{_figures(conversation)}]", sys.stderr), file=sys.stderr, flush=True)

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """Print nothing: standard error has the reason already."""

    def _label(self, text: str) -> None:
        # A label separates reasoning from answer without styles; a pipe gets the answer alone.
        if not has_styles(self._aside):
            print(text, file=self._aside)

    def _end_thinking(self) -> None:
        self._is_thinking = False
        print("\n" if self._is_live else "", file=self._aside, flush=True)


def _marked(piece: Piece) -> str:
    """Return the text of an answer; tokens accepted from a draft stand out where reported."""
    tokens = piece.tokens if isinstance(piece, ReportedPiece) else ()
    if "".join(text for text, _ in tokens) != piece.text:
        return safe(piece.text, sys.stdout)
    marked = ((safe(text, sys.stdout), is_accepted) for text, is_accepted in tokens)
    return "".join(bright(text, sys.stdout) if accepted else text for text, accepted in marked)


def _figures(conversation: Conversation) -> str:
    turn, model = conversation.last, conversation.model
    notes = {
        "interrupt": "stopped" if turn.answer else "stopped and forgotten",
        "length": f"cut at --max-new-tokens {model.max_tokens}"
        if model.max_tokens
        else "cut by the server",
        "context": f"the context of {model.max_model_len} tokens is full: /undo, /new or a larger "
        "--max-model-len",
    }
    parts = [f"{turn.tally.num_tokens} tokens, {turn.tally.tokens_per_s:.1f} tokens/s"]
    if turn.facts is not None:
        parts.append(turn.tally.drafting(model.num_speculative_tokens))
    if turn.num_prompt_tokens:
        parts.append(f"{turn.num_cached_tokens} of {turn.num_prompt_tokens} prompt tokens cached")
    if turn.ended in notes:
        parts.append(notes[turn.ended])
    return ", ".join(parts)
