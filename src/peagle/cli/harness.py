"""The harness of eval, bench and tune: prompts, models, servers, results, interrupts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bundled import BUNDLED, BUNDLED_TARGET, PAIR_NAMES, expand_bundled, pair_of
from peagle.cli import groups
from peagle.cli.flags import Given
from peagle.cli.settings import Layer, Settings
from peagle.cli.setup import note, quiet_libraries, set_threads
from peagle.config import (
    CandidateTrees,
    SamplingParams,
    SpeculativeConfig,
    TreeShape,
    require_writable_folder,
)
from peagle.config.engine import TARGET_DEFAULTS
from peagle.config.speculative import AUTO, MAX_BEAM, NEVER
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import NGRAM, DecodingMethod
from peagle.evaluation.prompts import Prompt
from peagle.models.head_json import (
    check_trees,
    default_k,
    is_parallel_head,
    kind_and_depth,
    with_depth,
)

if TYPE_CHECKING:
    import torch

    from peagle.models.target_facts import TargetSizes
    from peagle.results import Document

DEFAULT_SET = "humaneval"
_EAGLE3 = "eagle3"

Eagle3 = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="An EAGLE-3 head to compare with, a folder or a hub id.",
        show_default="the bundled one; none with a target of your own",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME,...",
        help="Prompt sets: bundled or of the hub by name, files (JSONL, text); the bundled "
        "ones are humaneval, mt_bench, gsm8k, heldout_code, summarization, "
        "question_answering, structured_json, code_edit, form_json, long_output and "
        "long_reasoning.",
        show_default=DEFAULT_SET,
    ),
]


# ---- requests ----


def load_prompts(
    names: Sequence[str] | None, limit: int | None, seed: int | None = None, column: str = ""
) -> dict[str, list[Prompt]]:
    """Load the prompts that --set, --limit and --shuffle-seed choose, by the name of their set.

    Without --set a few prompts of the default set are taken.
    """
    from peagle.evaluation.prompt_sets import load

    if not names:
        names, limit = [DEFAULT_SET], groups.DEFAULT_LIMIT if limit is None else limit
    # A file's name may hold commas.
    split = [one for name in names for one in ([name] if Path(name).exists() else name.split(","))]
    if not all(split):
        raise UserError(f"--set is {','.join(names)!r}; expected names with commas between.")
    if twice := [name for name in split if split.count(name) > 1]:
        raise UserError(f"--set names {twice[0]!r} twice; name it once.")
    return {name: load(name, limit, seed, prompt_column=column) for name in split}


def note_plain_prompts(sets: Mapping[str, Sequence[Prompt]]) -> None:
    """Tell the user which parts of prompts are not sent without a chat template."""
    if count := sum(bool(one.system or one.tools) for prompts in sets.values() for one in prompts):
        note(f"{count} prompts have system messages or tools; without a chat template none is sent")


def sampling_params(given: Given) -> SamplingParams:
    """Return the sampling parameters of requests, with a seed."""
    params = Settings(Layer(dict(given))).build("sampling")
    return params if params.seed is not None else replace(params, seed=0)


def template_fields(thinking: bool | None, extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further fields of every request to a server, with the thinking mode among them."""
    extra = dict(extra_body)
    if thinking is not None:
        variables = extra.get("chat_template_kwargs", {})
        extra["chat_template_kwargs"] = {**variables, "enable_thinking": thinking}
    return extra


# ---- models ----


@dataclass(frozen=True, slots=True)
class Models:
    """A target and the methods to measure on it.

    `target` is its TargetEnds alone if vLLM loads the rest. `engine_options` are the given fields
    of EngineConfig.
    """

    target: Any
    folder: Path
    name: str
    methods: list[DecodingMethod]
    engine_options: dict[str, Any]
    has_template: bool

    @property
    def default_k(self) -> int:
        """Return the K that every head was trained for, at most 7."""
        return min(default_k(one.trained_depth) for one in self.methods)

    @property
    def dtype(self) -> str:
        """Return the type of the target, and of its weights if they are quantised."""
        from peagle.models.target_facts import precision_of

        return precision_of(self.target)

    @property
    def target_sha256(self) -> str:
        """Return a digest that tells targets of the same name apart."""
        from peagle.models.fingerprint import TargetFingerprint

        return TargetFingerprint.of(self.target, tokens=False).lm_head_sha256


def named_methods(
    given: Given, eagle3: str | None, methods: Sequence[str], *, ngram: bool
) -> list[DecodingMethod]:
    """Return the methods that --draft, --eagle3 and --method name; by default the bundled heads.

    `ngram` adds prompt lookup.
    """
    named = [DecodingMethod.parse(text) for text in methods]
    target, draft = given.value("target"), given.value("speculative.model")
    if (pair := pair_of(target)) is not None:
        draft = draft or pair
        folder = Path(expand_bundled(draft, "draft")).expanduser()
        eagle3 = eagle3 or (None if is_parallel_head(folder) is False else pair)
    heads = [DecodingMethod("", draft)] if draft else []
    heads += [DecodingMethod(_EAGLE3, expand_bundled(eagle3, _EAGLE3))] if eagle3 else []
    heads += [one for one in named if one.source]
    if ngram or NGRAM in [one.name for one in named]:
        heads.append(DecodingMethod(NGRAM))
    if not heads:
        raise UserError(f"There is no head to measure on {target!r}; name one with --draft.")
    return heads


def given_shape(given: Given) -> dict[str, Any] | None:
    """Return the given shape of candidate trees, for a command that runs trees of one shape.

    Raises:
        UserError: it is "auto", which the machine decides.
    """
    shape = given.value(groups.TREES)
    if shape == AUTO:
        raise UserError(
            f"{given[groups.TREES].source} is {AUTO}; expected a shape here, the same on every "
            "machine, or none for chains. Give '{}' for the default shape."
        )
    return shape


def _measured_shape(given: Given, ks: Sequence[int]) -> tuple[TreeShape | None, int | None]:
    """Return the shape of trees to measure, and the K that sets their depth, if K does.

    Where the user leaves the depth open, the largest K is the depth, or max_nodes if that is less.
    """
    shape = given_shape(given)
    if shape is None or not ks or shape.get("prediction_depth") is not None:
        return shape, None
    depth = CandidateTrees.parse(shape, max(ks)).prediction_depth
    return {**shape, "prediction_depth": depth}, depth


@dataclass(frozen=True, slots=True)
class Found:
    """The folders of a target and of the methods' heads; None for a method without a head."""

    target: Path
    heads: list[Path | None]


def find_models(given: Given, methods: Sequence[DecodingMethod], ks: Sequence[int] = ()) -> Found:
    """Find the target and the heads, and fetch those of a hub; torch is not imported.

    Args:
        ks: as for `load_models`.

    Raises:
        UserError: as for `resolve_model`; or a head cannot draft the trees.
    """
    from peagle.models.loading import resolve_model

    sources = [expand_bundled(one.source, "draft") for one in methods]
    target = resolve_model(given.value("target") or BUNDLED, given.value("revision"))
    heads = [resolve_model(one, role="draft") if one else None for one in sources]
    shape, k = _measured_shape(given, ks)
    if shape is not None:
        trees = {"parallel_drafting_spec": shape, "num_speculative_tokens": k}
        for head in filter(None, heads):
            parallel, trained = kind_and_depth(head)
            if parallel:
                with_depth(SpeculativeConfig(model=str(head), **trees), head)
            else:
                _check_narrowed(display_name(str(head)), shape, trained)
    return Found(target, heads)


def _check_narrowed(head: str, shape: TreeShape, trained: int | None) -> None:
    """Refuse trees that an EAGLE-3 head cannot draft; tell the user if it drafts smaller ones."""
    found = _shape_for(False, trained, shape)
    check_trees(found, head, False, trained, None, None)
    if found != CandidateTrees.parse(shape, default_k(trained), parallel=False):
        note(f"the EAGLE-3 head {head!r} drafts no larger trees than {json.dumps(asdict(found))}")


def load_models(
    given: Given,
    methods: Sequence[DecodingMethod],
    found: Found,
    ks: Sequence[int] = (),
    *,
    whole: bool = True,
) -> Models:
    """Load the target and the heads, and check each head before anything runs.

    A method with a source and no name is named after the kind of its head. With
    --parallel-drafting-spec a head is three methods: chains, trees, and unless --no-prompt-lookup
    is given, trees that copies of the text join. Of the given `ks` each is a depth of the trees
    too, unless the option names their depth. Without `whole` only the ends of the target are
    loaded, for another engine.
    """
    from peagle.engine.placement import load_target
    from peagle.models.checkpoint import load_drafter
    from peagle.models.target import load_tokenizer
    from peagle.models.target_ends import TargetEnds

    settings = Settings(Layer(dict(given)))
    engine = settings.build("engine")
    set_threads(given.value("threads"))
    quiet_libraries()
    named = given.value("target")
    folder = found.target
    methods = [replace(one, source=expand_bundled(one.source, "draft")) for one in methods]
    if whole:
        target = load_target(folder, engine)
    else:
        target = TargetEnds.load(folder)
    shape, depth = _measured_shape(given, ks)
    of_trees = {
        "follows_k": depth is not None,
        "has_copies": given.value(groups.PROMPT_LOOKUP, True),
    }
    every = [
        method
        for one, head in zip(methods, found.heads, strict=True)
        for method in _with_head(one, head, target, shape, **of_trees)
    ]
    if shape is not None:
        every = _each_once(every)
    if shape is not None and not any(one.trees for one in every):
        raise UserError(
            "--parallel-drafting-spec asks for candidate trees, and no head is measured. "
            "Name one with --draft, or leave it out."
        )
    first = given.value(groups.DRAWN_FROM, NEVER)
    if first != NEVER and not any(one.trees and one.is_parallel for one in every):
        raise UserError(
            f"--drawn-chains-from is {first}, but no trees of a P-EAGLE head are measured, which "
            "alone have drawn chains. Leave it out, or give --parallel-drafting-spec and --draft."
        )
    names = [one.name for one in every]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"Two methods are called {twice[0]!r}; name one of them with --method NAME=FOLDER."
        )
    for one in every:
        try:
            if one.folder and one.trees is None:
                load_drafter(one.folder, target)
        except UserError as error:
            raise UserError(f"The head of {one.name} is of no use here: {error}") from None
    engine_options = {name: asdict(engine)[name] for name in settings.section("engine")}
    return Models(
        target,
        folder,
        display_name(str(BUNDLED_TARGET) if pair_of(named) == BUNDLED else named),
        every,
        engine_options | TARGET_DEFAULTS,
        bool(getattr(load_tokenizer(folder), "chat_template", None)),
    )


def _with_head(
    one: DecodingMethod,
    folder: Path | None,
    target: TargetSizes,
    trees: TreeShape | None,
    *,
    follows_k: bool,
    has_copies: bool,
) -> list[DecodingMethod]:
    from peagle.models.checkpoint import read_head

    if folder is None:
        return [one]
    head = read_head(folder, num_target_layers=target.num_layers)
    config = head.config
    kind = "peagle" if config.is_parallel else _EAGLE3
    if one.name == _EAGLE3 != kind:
        raise UserError(
            f"--eagle3 is {one.source!r}, a P-EAGLE head; name it with --draft, or with --method."
        )
    found = DecodingMethod(
        one.name or kind,
        display_name(one.source),
        str(folder),
        head.trained_length,
        config.trained_depth,
    )
    if trees is None:
        return [found]
    shape = _shape_for(config.is_parallel, config.trained_depth, trees)
    kinds = (False, True) if has_copies else (False,)
    grown = [found.with_trees(shape, follows_k=follows_k, has_copies=one) for one in kinds]
    return [found, *grown]


def _shape_for(parallel: bool, trained: int | None, trees: TreeShape) -> CandidateTrees:
    """Return the shape of a head's trees.

    The shape is asked of all heads that are compared, so an EAGLE-3 head drafts what it can of it.
    """
    shape = CandidateTrees.parse(trees, default_k(trained), parallel=parallel)
    if parallel:
        return shape
    depth = min(shape.prediction_depth, trained or shape.prediction_depth)
    beam = min(shape.num_parallel_trees, MAX_BEAM)
    return replace(shape, num_parallel_trees=beam, prediction_depth=depth)


def _each_once(methods: Sequence[DecodingMethod]) -> list[DecodingMethod]:
    """Return the methods with the chains and the trees of each head once.

    If the user names a head twice, its trees get the second name.
    """
    with_trees = {one.folder for one in methods if one.trees}
    kept: dict[Any, DecodingMethod] = {}
    for number, one in enumerate(methods):
        kind = one.trees is not None, one.has_copies
        key = (one.folder, *kind) if one.folder in with_trees else number
        if key not in kept:
            kept[key] = one
        elif one.trees is None:
            for has_copies, name in ((False, one.name), (True, f"{one.name}-text")):
                if (tree := kept.get((one.folder, True, has_copies))) is not None:
                    kept[one.folder, True, has_copies] = replace(tree, name=name)
    return [*kept.values()]


def display_name(source: str) -> str:
    """Return the user's name of a model; for a bundled model its short name."""
    root, path = BUNDLED_TARGET.parent, Path(source)
    if not path.is_relative_to(root):
        return source
    parts = path.relative_to(root).parts
    return "/".join(parts if parts[0] in PAIR_NAMES else (BUNDLED, *parts))


# ---- results ----


def provenance(target: str, dtype: str, device: torch.device | None = None) -> dict[str, Any]:
    """Return the origin of measurements: the command, the time, the machine and the target."""
    from peagle.environment import environment

    return {
        "command": shlex.join(["peagle", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(device),
        "target": target,
        "dtype": dtype,
    }


def check_output(
    output: Path | None,
    name: str = "",
    read_settings: Callable[[Path], Mapping[str, Any]] = lambda _: {},
    known: Mapping[str, Any] | None = None,
) -> None:
    """Refuse an output folder that cannot be used, before anything is loaded.

    It must be writable, and its file `name` must be readable, with the same settings as `known`.
    """
    if output is None:
        return
    from peagle.evaluation.journal import require_same_settings

    require_writable_folder(output, "--output")
    path = output / name
    if name and path.exists() and (before := read_settings(path)):
        known = known or {}
        require_same_settings(path, {key: before.get(key) for key in known}, known)


@contextmanager
def resumable(
    close_view: Callable[[], None], output: Path | None, measurements: Sized
) -> Iterator[None]:
    """Run a measurement; if it is interrupted or fails, say what is kept for the same command."""
    try:
        yield
    except BaseException:
        close_view()
        if output is not None and len(measurements):
            note(
                f"{len(measurements)} measurements are kept in {output}; the same command goes on "
                "with them"
            )
        raise
    close_view()


def conclude(
    results: Document, text: str, name: str, output: Path | None, output_format: groups.OutputFormat
) -> None:
    """Write results to their file, report on the whole output folder, and print the results.

    Without an output folder nothing is written. `text` holds the results for people.
    """
    report: Path | None = None
    if output is not None:
        from peagle.evaluation.report import write_report
        from peagle.models.checkpoint.files import write_json

        write_json(output / name, results.to_json())
        report = write_report(output)
    is_json = output_format is groups.OutputFormat.JSON
    print(json.dumps(results.to_json(), indent=2) if is_json else text)
    if report is not None:
        note(f"the report is {report}")
