"""`LLM`: load a target and a draft head, generate text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from peagle.bundled import BUNDLED
from peagle.chat import opens_thinking, render_chat, resolve_chat_template, with_answer
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.config.checks import did_you_mean, require, require_neutral
from peagle.config.engine import TARGET_DEFAULTS
from peagle.engine import EngineStats, LLMEngine
from peagle.engine.detokenizer import split_output
from peagle.engine.head import check_corrections
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.placement import choose_threads, load_target
from peagle.engine.requests import Prompt, Requests
from peagle.errors import CheckpointError, UserError
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.messages import ChatMessage, Message
from peagle.models.end_tokens import eos_token_ids
from peagle.models.loading import resolve_model, with_local_head
from peagle.models.target import TargetModel, load_tokenizer
from peagle.thinking import family_splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONE_PROCESS = "one process runs the whole model."
# Arguments of vLLM's LLM that are taken with these values only, and why.
_NEUTRAL_OPTIONS: dict[str, tuple[object, str]] = {
    "engine": ("peagle", "peagle serve --engine vllm starts vLLM."),
    "tensor_parallel_size": (1, _ONE_PROCESS),
    "pipeline_parallel_size": (1, _ONE_PROCESS),
    "data_parallel_size": (1, _ONE_PROCESS),
    "trust_remote_code": (False, "code of a model folder is never run."),
    "tokenizer_mode": ("auto", "the tokenizer is that of the model's folder."),
    "skip_tokenizer_init": (False, "the tokenizer is always loaded."),
    "load_format": ("auto", "weights are read from safetensors files."),
    "config_format": ("auto", "the model's folder is in Hugging Face format."),
    "cpu_offload_gb": (0, "all weights are on one device."),
    "enable_chunked_prefill": (True, "long prompts always run in chunks."),
    "enable_lora": (False, "there are no adapters."),
    "hf_overrides": (None, "change config.json itself."),
    "limit_mm_per_prompt": (None, "prompts are text."),
}
# Arguments of vLLM's LLM that change no output: how it logs, and how it exchanges between GPUs.
_WITHOUT_EFFECT = {"disable_log_stats", "disable_custom_all_reduce", "swap_space"}


def named_target(target: str | Path | None, model: str | Path | None) -> str | Path | None:
    """Return the target, given under one of its two names.

    Raises:
        UserError: both names were given.
    """
    if target is not None and model is not None:
        raise UserError(
            f"target is {str(target)!r} and model is {str(model)!r}; both name the target, leave "
            "one of them out."
        )
    return model if target is None else target


__all__ = ["LLM", "ChatOutput", "Prompt", "RequestOutput", "StreamChunk"]


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The answer to a conversation.

    Attributes:
        answer: the model's answer, without its reasoning.
        reasoning: the text between the thinking markers, "" if it did not think.
        messages: the conversation with the answer as its last message, for the next turn.
        output: the request as `generate` gives it; its attributes are attributes of the answer too.
    """

    answer: str
    reasoning: str
    messages: list[dict[str, Any]]
    output: RequestOutput

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while it is copied it has no output yet
            raise AttributeError(name)
        return getattr(self.output, name)


class LLM:
    """A target, with or without a draft head, ready to generate.

    Args:
        target: model folder or hub id, as "owner/name" or "owner/name@revision"; "bundled" or None
            takes the bundled code model.
        revision: branch, tag or commit of the target's hub id.
        speculative_config: how to draft: a SpeculativeConfig, a mapping or JSON text in vLLM's
            form; None decodes plainly.
        model: a target already loaded, in place of `target`; or what `target` takes, under the name
            that other engines have for it.
        **engine_options: fields of EngineConfig, None for the default; and arguments of vLLM's LLM,
            where they ask for what happens here anyway (`tensor_parallel_size=1`).

    Raises:
        UserError: a folder, a hub id, a head or an option is not usable.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        revision: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        model: TargetModel | str | Path | None = None,
        **engine_options: Any,
    ) -> None:
        config = _engine_config(engine_options, model if target is None else target)
        if isinstance(model, (str, Path)):
            target, model = named_target(target, model), None
        elif not isinstance(model, (TargetModel, NoneType)):
            raise UserError(
                f"model is of type {type(model).__name__}; expected a folder, a hub id, or a "
                "loaded TargetModel."
            )
        speculative = None
        if speculative_config is not None:
            speculative = with_local_head(SpeculativeConfig.parse(speculative_config))
        if model is None:
            check_corrections(speculative)
            model = load_target(resolve_model(target or BUNDLED, revision), config)
        elif target is not None or revision is not None:
            raise UserError(
                f"A loaded model was given, and target {target!r}, revision {revision!r}; leave "
                "one or the other out."
            )
        elif replace(config, **TARGET_DEFAULTS) != config:
            raise UserError(
                f"A loaded model was given, and dtype {config.dtype!r}, device {config.device!r}, "
                f"quantization {config.quantization!r}, fp8_activations "
                f"{config.fp8_activations!r}, kv_cache_dtype {config.kv_cache_dtype!r}; it is "
                f"{model.dtype} on {model.device}, quantization {model.quantization!r}, "
                f"fp8_activations {model.fp8_activations!r}, "
                f"kv_cache_dtype {model.kv_cache_dtype!r}. Leave them out, or load it so."
            )
        choose_threads(model.model)
        self.target = model
        self.tokenizer = load_tokenizer(model.name)
        ends = eos_token_ids(model.name, self.tokenizer)
        self.engine = LLMEngine(model, config, speculative, ends)
        self.requests = Requests(self.engine, self.tokenizer)
        self._request_ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together.

        Args:
            prompts: text, token ids, a mapping of `prompt` or `prompt_token_ids`, or a list of
                these.
            params: for all of them, or one each; None takes `default_params`.
            priority: for all of them, or one each; lower goes first.
            sampling_params: `params` under vLLM's name.
            use_tqdm: show a progress bar of the prompts; a function makes it, in place of tqdm.
            lora_request: None.

        Returns:
            an output a prompt, in order: the first of its `params.n`, which its `outputs` list.

        Raises:
            UserError: a prompt is empty or too long, or parameters ask for a missing feature;
                nothing is generated then.
        """
        require_neutral("lora_request", lora_request, None, "there are no adapters.")
        params = _given_once("params", params, "sampling_params", sampling_params)
        listed = self._as_list(prompts)
        found: list[list[RequestOutput]] = [[] for _ in listed]
        with _progress(use_tqdm, len(listed)) as advance:
            for chunk in self.stream(listed, params, priority=priority or 0):
                if chunk.output is not None:
                    found[chunk.index].append(chunk.output)
                    advance(chunk.output_index == 0)
        return [self._of_prompt(*both) for both in zip(listed, found, strict=True)]

    def _of_prompt(self, prompt: Prompt, outputs: list[RequestOutput]) -> RequestOutput:
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        text, request_id = given if isinstance(given, str) else None, str(next(self._request_ids))
        first, *others = (
            replace(
                output,
                prompt=text,
                request_id=request_id,
                logprobs=self._with_texts(output.logprobs),
                prompt_logprobs=self._with_texts(output.prompt_logprobs),
            )
            for output in sorted(outputs, key=lambda output: output.index)
        )
        return replace(first, others=tuple(others))

    def _with_texts(self, given: Sequence[TokenLogprobs | None] | None) -> Any:
        """Return log-probabilities with the texts of their tokens."""
        decode = self.tokenizer.decode
        return given and [
            one and replace(one, texts={token_id: decode([token_id]) for token_id in one})
            for one in given
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamChunk]:
        """Complete prompts, yielding each step's tokens as they come.

        Leaving the iterator early cancels unfinished outputs. Arguments and errors as `generate`.
        """
        prompts = self._as_list(prompts)
        if params is None:
            params = self.default_params()
        # A copy each: checked as they stand now, and safe from what their owner assigns.
        every = [
            replace(one) for one in each(params, SamplingParams, "sampling params", len(prompts))
        ]
        priorities = each(priority, int, "priorities", len(prompts))
        requests = self.requests
        if requests.has_unfinished:
            raise UserError(
                "This LLM is generating already; finish or close the other stream first, or make "
                "another LLM on the same model."
            )
        try:
            for index, prompt in enumerate(prompts):
                with _at(f"Prompt {index + 1} of {len(prompts)}"):
                    requests.add(index, prompt, every[index], priority=priorities[index])
            while requests.has_unfinished:
                yield from requests.step()
        finally:
            requests.cancel_all()

    def default_params(self) -> SamplingParams:
        """Return the sampling that the model's generation_config asks for; greedy if it does not.

        The stop ids there count for every request, whatever its params.

        Raises:
            CheckpointError: the generation_config has a value that is out of range.
        """
        try:
            return SamplingParams(**self.target.generation_defaults())
        except UserError as error:
            path = Path(self.target.name, "generation_config.json")
            raise CheckpointError(f"{path}: {error} Mend the file, or give params.") from None

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `default_params` under vLLM's name."""
        return self.default_params()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the target."""
        return self.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Return the engine's state now, and its counters."""
        return self.engine.stats

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[ChatOutput]:
        """Answer conversations, batched together.

        Args:
            conversations: one list of messages, or several; a message is a `ChatMessage` or a
                mapping with role and content.
            params: for all of them, or one each.
            use_tqdm: see `generate`.
            lora_request: see `generate`.
            messages: `conversations` under vLLM's name.
            sampling_params: `params` under vLLM's name.
            chat_template_content_format: "auto", "string" or "openai"; the text parts of a message
                reach the template as one text with each of them.
            chat_template_kwargs: `template_kwargs` under vLLM's name.
            **template_options: `chat_template`, `thinking`, `continue_final_message`,
                `template_kwargs`, `tools`, ... as `peagle.chat.render_chat` has them.

        Returns:
            one answer a conversation, in order: the first one where `params.n` is above 1.

        Raises:
            UserError: a conversation, the template or a template option is not usable; nothing is
                generated then.
        """
        chats: Any = _given_once("conversations", conversations, "messages", messages)
        kwargs = template_options.get("template_kwargs")
        kwargs = _given_once(
            "template_kwargs", kwargs, "chat_template_kwargs", chat_template_kwargs
        )
        template_options["template_kwargs"] = kwargs
        formats = ("auto", "string", "openai")
        given, expected = chat_template_content_format, "one of " + ", ".join(formats)
        require(given in formats, "chat_template_content_format", given, expected)
        if chats is None:
            raise UserError("No conversation was given; expected a list of messages.")
        if chats and isinstance(chats[0], ChatMessage | Mapping):
            chats = [chats]
        prompts: list[Prompt] = []
        for index, chat in enumerate(chats):
            with _at(f"Conversation {index + 1} of {len(chats)}"):
                ids = render_chat(self.tokenizer, chat, **template_options)
                prompts.append({"prompt_token_ids": ids, "prompt": self.tokenizer.decode(ids)})
        outputs = self.generate(
            prompts,
            params,
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        answers = []
        source = self._template_source(template_options) if chats else ""
        for chat, output in zip(chats, outputs, strict=True):
            opened = opens_thinking(self.tokenizer, output.prompt_token_ids)
            reasoning, answer = split_output(
                self.tokenizer,
                output.text,
                output.token_ids,
                source,
                opened=opened,
                stop=output.stop_reason,
            )
            if family_splitter(source) is None:
                turns = with_answer(chat, output.text, opened=opened)
            else:
                turns = with_answer(chat, answer, opened=False)
            answers.append(ChatOutput(answer, reasoning, turns, output))
        return answers

    def _template_source(self, options: Mapping[str, Any]) -> str:
        """Return the chat template that `render_chat` takes with these options."""
        template, has_tools = options.get("chat_template"), bool(options.get("tools"))
        return resolve_chat_template(self.tokenizer, template, with_tools=has_tools)

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str | Mapping):
            return [prompts]
        if not isinstance(prompts, Iterable):
            raise UserError(f"The prompts are {prompts!r}; expected text, token ids, or a list.")
        items: list[Any] = list(prompts)
        return [items] if items and isinstance(items[0], int) else items


def _engine_config(options: Mapping[str, Any], model: object) -> EngineConfig:
    """Return the engine's configuration, from its own options and from neutral ones of vLLM."""
    known = [field.name for field in fields(EngineConfig)]
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            own |= {} if value is None else {name: value}
        elif name == "tokenizer":
            if value is not None and str(value) != str(model):
                raise UserError(
                    f"tokenizer is {value!r}; expected that of the model's folder. Leave it out."
                )
        elif name in _NEUTRAL_OPTIONS:
            require_neutral(name, value, *_NEUTRAL_OPTIONS[name])
        elif name not in _WITHOUT_EFFECT:
            raise UserError(
                f"Unknown engine option {name!r}; known options: {', '.join(sorted(known))}."
                + did_you_mean(name, known)
            )
    return EngineConfig(**own)


def _given_once(name: str, value: Any, other: str, other_value: Any) -> Any:
    """Return an argument that has two names, under whichever of them it was given."""
    if value is not None and other_value is not None:
        raise UserError(f"{name} and {other} were both given; leave one of the two out.")
    return other_value if value is None else value


@contextmanager
def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar, where one is wanted; yield the function that moves it on."""
    if not use_tqdm:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, desc="Processed prompts") as bar:
        yield bar.update


def each(values: Any, kind: type, what: str, count: int) -> list[Any]:
    """Return a list of one value each, from one for all or a list; else raise a UserError."""
    listed = [values] * count if isinstance(values, kind) else values
    if not isinstance(listed, Sequence) or not all(isinstance(one, kind) for one in listed):
        raise UserError(f"The {what} are {values!r}; expected {kind.__name__}, or a list of them.")
    if len(listed) != count:
        raise UserError(f"{len(listed)} {what} for {count} prompts; expected one each.")
    return list(listed)


@contextmanager
def _at(which: str) -> Iterator[None]:
    """Let a user's mistake name the item of the list in which it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{which}: {error}") from None
