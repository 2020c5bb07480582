"""The models of `peagle eval`: found, loaded and checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from peagle.bundled import BUNDLED, BUNDLED_TARGET, expand_bundled
from peagle.cli import options
from peagle.cli.flags import Given
from peagle.cli.settings import Settings
from peagle.config import EngineConfig
from peagle.errors import UserError
from peagle.evaluation.compare import load_target
from peagle.evaluation.decoding_methods import NGRAM, DecodingMethod
from peagle.evaluation.eval_run import LocalMethod, check_heads
from peagle.models.checkpoint import read_head_config, trained_length
from peagle.models.loading import resolve_model
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.target_ends import TargetEnds
from peagle.models.target_facts import TargetSizes
from peagle.models.trained_depth import default_depth

_EAGLE3 = "eagle3"


Target = TypeVar("Target", TargetModel, TargetEnds)


@dataclass(frozen=True, slots=True)
class EvalModels(Generic[Target]):
    """A target and the methods to measure on it.

    Attributes:
        target: loaded, or its ends where another engine loads the rest.
        folder: where it is.
        name: as the user gave it.
        methods: heads that fit it, and prompt lookup.
        engine_options: fields of EngineConfig that were given, the target's own left out.
        has_template: whether its tokenizer has a chat template.
    """

    target: Target
    folder: Path
    name: str
    methods: list[LocalMethod]
    engine_options: dict[str, Any]
    has_template: bool

    @property
    def default_k(self) -> int:
        """K where none is given: one that every head was trained for, at most 7."""
        return min(default_depth(one.trained_depth) for one in self.methods)

    @property
    def dtype(self) -> str:
        """Of the target."""
        return str(self.target.dtype).removeprefix("torch.")


def load_models(
    given: Given, settings: Settings, eagle3: str | None, methods: Sequence[str], *, ngram: bool
) -> EvalModels[TargetModel]:
    """Find and load what was named; nothing named is the bundled pair.

    Args:
        given: the options of the model and of the engine.
        settings: the same, as sections.
        eagle3: what --eagle3 names.
        methods: what --method names.
        ngram: measure prompt lookup too.

    Raises:
        UserError: a model is not there, a head does not fit the target or is of the other kind,
            two methods have one name, or there is none.
    """

    def load(folder: Path, engine: EngineConfig) -> TargetModel:
        return load_target(folder, dtype=engine.dtype, device=engine.device)

    return _found(given, settings, eagle3, methods, load, ngram=ngram)


def find_models(
    given: Given, settings: Settings, eagle3: str | None, methods: Sequence[str]
) -> EvalModels[TargetEnds]:
    """The same for another engine: the target is not loaded, and there is no prompt lookup.

    Raises:
        UserError: as `load_models`.
    """

    def load(folder: Path, engine: EngineConfig) -> TargetEnds:
        return TargetEnds.load(folder)

    if NGRAM in methods:
        raise UserError("--method is 'ngram'; vLLM is measured with heads only. Leave it out.")
    return _found(given, settings, eagle3, methods, load, ngram=False)


def _found(
    given: Given,
    settings: Settings,
    eagle3: str | None,
    methods: Sequence[str],
    load: Callable[[Path, EngineConfig], Target],
    *,
    ngram: bool,
) -> EvalModels[Target]:
    named = [DecodingMethod.parse(text) for text in methods]
    if any(one.is_plain for one in named):
        raise UserError("Plain decoding drafts nothing to accept; `peagle bench` measures it.")
    engine = settings.build("engine")
    own, draft = options.own_target(given.value("target")), given.value("speculative.model")
    if own is None:
        draft, eagle3 = draft or BUNDLED, eagle3 or BUNDLED
    heads = [("", draft)] if draft else []
    heads += [(_EAGLE3, eagle3)] if eagle3 else []
    heads += [(one.name, one.source) for one in named if one.source]
    heads = [
        (name, expand_bundled(source, "eagle3" if name == _EAGLE3 else "draft"))
        for name, source in heads
    ]
    with_ngram = ngram or NGRAM in [one.name for one in named]
    if not heads and not with_ngram:
        raise UserError(f"There is no head to measure on {own!r}; name one with --draft.")
    options.set_threads(given.value("threads"))
    options.quiet_libraries()
    folder = resolve_model(own or BUNDLED, given.value("revision"))
    found = [(name, source, resolve_model(source, role="draft")) for name, source in heads]
    target = load(folder, engine)
    local = [_local(name, source, head, target) for name, source, head in found]
    local += [LocalMethod(DecodingMethod(NGRAM))] if with_ngram else []
    names = [one.method.name for one in local]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"Two methods are called {twice[0]!r}; name one of them with --method NAME=FOLDER."
        )
    check_heads(target, local)
    return EvalModels(
        target,
        folder,
        shown(own or str(BUNDLED_TARGET)),
        local,
        {name: asdict(engine)[name] for name in settings.section("engine")} | _AS_LOADED,
        bool(getattr(load_tokenizer(folder), "chat_template", None)),
    )


# The target is loaded as they say already.
_AS_LOADED = {"dtype": "auto", "device": "auto"}


def _local(name: str, source: str, folder: Path, target: TargetSizes) -> LocalMethod:
    config, facts = read_head_config(folder, num_target_layers=target.num_layers)
    kind = "peagle" if config.is_parallel else _EAGLE3
    if name == _EAGLE3 != kind:
        raise UserError(
            f"--eagle3 is {source!r}, a P-EAGLE head; name it with --draft, or with --method."
        )
    return LocalMethod(
        DecodingMethod(name or kind, shown(source)),
        str(folder),
        trained_length(facts),
        config.trained_depth,
    )


def shown(source: str) -> str:
    """A model as it was named; one of the bundled by its name alone."""
    path = Path(source)
    return f"bundled/{path.name}" if path.parent == BUNDLED_TARGET.parent else source
