"""The models, drafts, engine and sampling that the options of a command choose."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bundled import BUNDLED, Role, expand_bundled, pair_of
from peagle.cli.flags import Given
from peagle.cli.settings import (
    FORMAT_VERSION,
    SECTIONS,
    Layer,
    Setting,
    Settings,
    as_written,
    environment_layers,
    file_layer,
    speculative_layer,
)
from peagle.cli.terminal import dim
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.extras import require_package

if TYPE_CHECKING:
    from peagle.llm import LLM


class Setup:
    """The models to load and their options, every value checked.

    Flags override the environment, which overrides the file, which overrides the command's
    defaults. Without a `speculative` configuration the engine decodes plainly.
    """

    def __init__(self, given: Given, *defaults: Layer) -> None:
        file = given.value("config")
        self.settings = settings = Settings(
            *defaults,
            *([] if file is None else [file_layer(file)]),
            *environment_layers(os.environ),
            _flags(given),
            _speculative_flags(given),
        )
        self.params: SamplingParams = settings.build("sampling")
        self.engine: EngineConfig = settings.build("engine")
        self.is_off = "no_speculation" in given
        self.speculative = None if self.is_off else _speculation(settings)
        self.pair = pair_of(settings.value("target"))
        self.target = expand_bundled(settings.value("target") or BUNDLED, "target")
        self.threads: int | None = given.value("threads")
        self.show_memory = "show_memory" in given

    def show(
        self,
        sections: tuple[str, ...] = ("engine", "sampling"),
        of_model: tuple[str, ...] = (),
        *,
        with_decided: bool = True,
    ) -> None:
        """Print the merged settings as JSON, in the tables of a file, and the values they decide.

        Without `with_decided` the latter are left out, since another engine decides them.
        """
        given, speculative = self.settings, self._with_depth()
        if not with_decided and self.speculative is not None and speculative is not None:
            # Of what is filled in, K alone is the same in another engine.
            k = speculative.num_speculative_tokens
            speculative = replace(self.speculative, num_speculative_tokens=k)
        tables = {name: as_written(asdict(given.build(name))) for name in sections}
        if "sampling" in tables:
            unset = [name for name in of_model if given.value(f"sampling.{name}") is None]
            tables["sampling"] |= dict.fromkeys(unset)
        merged = {
            "format_version": FORMAT_VERSION,
            "target": self.target,
            "revision": given.value("revision"),
            "speculative": speculative and as_written(asdict(speculative)),
            **tables,
        }
        if with_decided:
            from peagle.cli.decided import decided

            merged["decided"] = decided(self.target, self.engine, speculative, self.threads)
        print(json.dumps(merged, indent=2))

    def _with_depth(self) -> SpeculativeConfig | None:
        """Return the speculative configuration with the K of a head in a folder."""
        speculative = self.speculative
        if speculative is None or speculative.model is None:
            return speculative
        folder = Path(expand_bundled(speculative.model, "draft")).expanduser()
        if not folder.is_dir():
            return speculative
        from peagle.models.head_json import with_depth

        return with_depth(speculative, folder)

    def load(self, folder: Path | None = None) -> LLM:
        """Load the models; print the memory plan, on a CPU only with --show-memory."""
        self.note_plain_decoding()
        self.check_paths()
        from peagle.models.loading import resolve_model

        # The hub comes before torch is imported, so that an unreachable hub is reported at once.
        folder = folder or resolve_model(self.target, self.settings.value("revision"))
        speculative = self.local_speculative()
        self.prepare()
        from peagle.llm import LLM

        llm = LLM(folder, speculative_config=speculative, **asdict(self.engine))
        if self.show_memory or llm.target.device.type == "cuda":
            print(dim(str(llm.engine.memory_plan), sys.stderr), file=sys.stderr)
        return llm

    def local_speculative(self) -> SpeculativeConfig | None:
        """Return the speculative configuration with its head in a folder (`with_local_head`)."""
        from peagle.models.head_json import is_parallel_head
        from peagle.models.loading import with_local_head

        found = self.speculative and with_local_head(self.speculative)
        folder = None if found is None or found.correction else found.model
        if folder is not None and not is_parallel_head(Path(folder)):
            source = self.settings.source("speculative.correction")
            note(f"{source}: the EAGLE-3 head {folder!r} has none")
        return found

    def check_paths(self, chat_template: str | None = None) -> None:
        """Refuse missing models and corrections, a missing template and a missing package."""
        if self.params.structured_output is not None:
            require_package("xgrammar", "grammar", "Structured output")
        head = self.speculative and self.speculative.model
        check_paths(self.target, head, chat_template=chat_template)
        for name, source in self.speculative.corrections if self.speculative else ():
            path = Path(source).expanduser()
            if not (path.is_file() or (path / "correction.st").exists()):
                raise UserError(
                    f"The correction {name!r} is {source!r}, which is no file and no folder with "
                    "a correction.st; name one of both, as `peagle adapt` writes it."
                )

    def note_plain_decoding(self) -> None:
        """Tell the user that the engine decodes plainly without a head."""
        if self.speculative is None and not self.is_off:
            note("no --draft: decoding plainly (--method ngram needs no head)")

    def prepare(self) -> None:
        """Set up the libraries before models are loaded."""
        set_threads(self.threads)
        quiet_libraries()


def note(text: str) -> None:
    """Print a note to standard error."""
    print(f"peagle: note: {text}", file=sys.stderr)


def _flags(given: Given) -> Layer:
    """Return the layer of flags other than speculative ones; a target resets the revision."""
    sections = {*SECTIONS, "target", "revision"} - {"speculative"}
    chosen = {k: setting for k, setting in given.items() if k.partition(".")[0] in sections}
    return Layer(chosen, ("revision",) if "target" in chosen else ())


def _speculative_flags(given: Given) -> Layer:
    """Return the layer of --speculative-config, --no-speculation or options for single keys."""
    shorthands = {k: setting for k, setting in given.items() if k.startswith("speculative.")}
    whole, off = given.get("speculative_config"), given.get("no_speculation")
    alone = off or whole
    others = [*shorthands.values(), *([whole] if off and whole else [])]
    if alone and others:
        raise UserError(
            f"{alone.source} and {others[0].source} contradict each other; leave one of them out."
        )
    if whole:
        return speculative_layer(whole.value, whole.source)
    # Another source of drafts drops the keys of the source in a lower layer.
    keys: tuple[str, ...] = ()
    if "speculative.model" in given or given.value("speculative.method") == "ngram":
        keys = ("method", "model", "revision", "parallel_drafting", "max_model_len")
    return Layer(shorthands, tuple(f"speculative.{key}" for key in keys))


def _speculation(settings: Settings) -> SpeculativeConfig | None:
    """Return the speculative configuration of the settings; None decodes plainly."""
    given: dict[str, Any] = settings.section("speculative")
    if given.get("method") != "ngram" and "model" not in given:
        target = settings.value("target")
        if (pair := pair_of(target)) is None:
            if not given:
                return None
            source = settings.source(f"speculative.{next(iter(given))}")
            raise UserError(
                f"{source} was given, but no draft head for {target!r}. Name one with --draft, or "
                "look drafts up in the text with --method ngram."
            )
        head = Setting(expand_bundled(pair, "draft"), "default")
        settings.put(Layer({"speculative.model": head}))
    return settings.build("speculative")


def name_target(given: Given, model: str | None) -> None:
    """Let the argument MODEL name the target, as --target does."""
    if model is None:
        return
    if "target" in given:
        raise UserError(f"{model!r} and --target were both given; leave one of them out.")
    given["target"] = Setting(model, "MODEL")


def thinking_mode(thinking: bool | None, chat_template: bool | None) -> bool | None:
    """Return the thinking mode to set; None for text without a template."""
    if chat_template is not False:
        return thinking
    if thinking:
        raise UserError("--no-chat-template was given, so there is no thinking mode to turn on.")
    return None


def check_paths(
    target: str | None,
    draft: str | None = None,
    eagle3: str | None = None,
    methods: Iterable[str] | None = None,
    chat_template: str | None = None,
) -> None:
    """Refuse missing files before torch is imported: a model that is neither here nor a hub id, a
    GGUF file that cannot be read, a template file.
    """
    from peagle.chat import check_template_file
    from peagle.evaluation.decoding_methods import DecodingMethod
    from peagle.models.loading import find_model

    named: list[tuple[str | None, Role]] = [(target, "target"), (draft, "draft")]
    named += [
        (eagle3, "eagle3"),
        *((DecodingMethod.parse(m).source, "draft") for m in methods or ()),
    ]
    for name, role in named:
        if name:
            find_model(name, role)
    check_template_file(chat_template)


def set_threads(threads: int | None) -> None:
    """Set torch's number of CPU threads; None leaves it to the model and the machine."""
    if threads is None:
        return
    from peagle.engine import placement as library

    library.fix_threads(threads)


def quiet_libraries() -> None:
    """Keep the progress bars and advice of transformers out of our output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    disable: Callable[[], None] = logging.disable_progress_bar
    disable()
    logging.set_verbosity_error()
