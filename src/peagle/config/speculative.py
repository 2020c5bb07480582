"""How drafts are made: the fields of vLLM's speculative configuration, and its parser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from peagle.config.checks import (
    BOOLEAN,
    OPTIONAL_BOOLEAN,
    FieldCheck,
    check_fields,
    choice_of,
    did_you_mean,
    is_int,
    is_number,
    require,
    unique_keys,
    whole,
)
from peagle.errors import UserError

Method = Literal["eagle3", "ngram"]
DraftSampling = Literal["argmax", "probabilistic"]
Quantization = Literal["fp8", "int8", "int4"]

MAX_SPECULATIVE_TOKENS = 64
MAX_TREE_NODES = 63  # the newest token and the nodes of a tree are the bits of one word
DEFAULT_K = 7  # K where neither the user nor the head sets it
DEFAULT_TREE_NODES = 15
MAX_BEAM = 8  # nodes of a depth from which an EAGLE-3 head goes on
DEFAULT_BEAM = 4
MAX_BEAM_ROWS = 64  # of one sequence: the nodes that such a head reads are the bits of one word
AUTO = "auto"  # in place of a schedule of K, or of a shape of trees
NEVER = "never"  # in place of a temperature
DRAWN_CHAINS_FROM = 0.6  # the default of drawn_chains_from; docs/trees.md has the figures

# Keys of vLLM that concern how it runs, not what it drafts: accepted with the values for which this
# engine does the same.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "enforce_eager": (False, True),
    "disable_padded_drafter_batch": (False, True),
    "use_local_argmax_reduction": (False, True),
    "draft_tensor_parallel_size": (1,),
}
RUNTIME_KEYS = tuple(_WITHOUT_EFFECT)
_DRAFT_SAMPLE_METHODS = {"greedy": "argmax", "probabilistic": "probabilistic"}
_REJECTION_SAMPLE_METHODS = ("standard", "synthetic")
_TREES = "parallel_drafting_spec"
TREE_DEFAULTS = (
    f"Each key may be left out: max_nodes is then {DEFAULT_TREE_NODES} (or more, if another value "
    f"is), num_parallel_trees max_nodes (of an EAGLE-3 head {DEFAULT_BEAM} at most), and "
    f"prediction_depth what the head was trained for, at most {DEFAULT_K}."
)
_SLOTS_AHEAD = 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a correction
_MAX_COPY_MATCH = 16  # tokens that a lookup compares at most where copies join trees


@dataclass(frozen=True, slots=True)
class CandidateTrees:
    """The shape of the candidate trees that a head drafts: `parallel_drafting_spec`.

    `parse` fills in what a user leaves out.

    Attributes:
        num_parallel_trees: w, most distinct first tokens. Left out: max_nodes, so that the
            probabilities of the paths alone decide. An EAGLE-3 head goes on from a beam of w nodes
            at each depth, and each of them has w children (`kernels.trees.beams`); 1 to 8, left
            out 4, or max_nodes if that is less.
        prediction_depth: d, most drafts on a path; at most what the head was trained for. Left
            out: K where that is given, else what the head was trained for, at most 7, or 7 if the
            head does not name it; never more than max_nodes.
        max_nodes: N, most drafts of a sequence that a step verifies. Left out: 15, or w, d or K
            where one of them is larger. With the newest token 15 nodes are 16 rows, and matrix
            products take as many at a time (docs/trees.md).

    Raises:
        UserError: a value is out of range.
    """

    num_parallel_trees: int
    prediction_depth: int
    max_nodes: int

    def __post_init__(self) -> None:
        most = MAX_TREE_NODES
        n = self.max_nodes
        ok = is_int(n) and 1 <= n <= most
        require(ok, f"{_TREES}.max_nodes", n, f"a whole number from 1 to {most}", TREE_DEFAULTS)
        for name in ("num_parallel_trees", "prediction_depth"):
            value = getattr(self, name)
            ok = is_int(value) and 1 <= value <= n
            expected = f"a whole number from 1 to max_nodes ({n})"
            require(ok, f"{_TREES}.{name}", value, expected, TREE_DEFAULTS)

    def depth(self, num_verified: int) -> int:
        """Return the most drafts on a path where steps verify so many nodes of each sequence.

        Few nodes seldom reach far, and each slot of the head takes time. Sequences that are sure
        get nodes of others: a slot more.
        """
        return min(self.prediction_depth, num_verified + _SLOTS_AHEAD) if num_verified else 0

    def num_drawn(self, num_verified: int) -> int:
        """Return the drafts of a drawn chain where steps verify so many nodes of each sequence.

        The chain has half of the nodes. Its length follows the load alone: if it followed drafts,
        outputs would not have the target's distribution.
        """
        return min(self.prediction_depth, (num_verified + 1) // 2)

    @classmethod
    def parse(
        cls,
        source: CandidateTrees | Mapping[str, Any] | str | None,
        depth: int = DEFAULT_K,
        *,
        parallel: bool = True,
    ) -> CandidateTrees:
        """Return the shape that a mapping of the three attributes gives; each may be left out.

        Args:
            source: the mapping; null stands for the default.
            depth: the default of prediction_depth.
            parallel: whether the head is a P-EAGLE head. The default of num_parallel_trees is
                max_nodes then, and at most 4 for an EAGLE-3 head.

        Raises:
            UserError: no mapping, an unknown key, or a value out of range.
        """
        if isinstance(source, cls):
            return source
        names = [field.name for field in fields(cls)]
        expected = f"an object with the keys {', '.join(names)}"
        or_auto = f'"{AUTO}" or {expected}' if source != AUTO else expected
        require(isinstance(source, Mapping), _TREES, source, or_auto, TREE_DEFAULTS)
        assert isinstance(source, Mapping)
        if unknown := sorted(set(map(str, source)) - set(names)):
            raise UserError(
                f"{_TREES} has the unknown key {unknown[0]!r}; expected {expected}."
                f"{did_you_mean(unknown[0], names)} {TREE_DEFAULTS}"
            )
        w, d, n = (source.get(name) for name in names)
        if n is None:
            given = (w, depth if d is None else d)
            asked = [int(one) for one in given if one is not None and is_int(one)]
            n = min(max([DEFAULT_TREE_NODES, *asked]), MAX_TREE_NODES)
        if d is None:
            d = min(depth, n) if is_int(n) else depth
        if w is None:
            w = n if parallel or not is_int(n) else min(DEFAULT_BEAM, n)
        return cls(w, d, n)


TreeShape = CandidateTrees | Mapping[str, Any] | Literal["auto"]


_CHECKS = {
    "method": FieldCheck(lambda name: name in ("eagle3", "ngram"), '"eagle3" or "ngram"'),
    "draft_sampling": FieldCheck(
        lambda name: name in ("argmax", "probabilistic"), '"argmax" or "probabilistic"'
    ),
    "parallel_drafting": OPTIONAL_BOOLEAN,
    "revision": FieldCheck(
        lambda name: name is None or (isinstance(name, str) and bool(name)),
        "a branch, a tag or a commit",
    ),
    "quantization": choice_of(None, *get_args(Quantization)),
    "check_target": BOOLEAN,
    "correction": BOOLEAN,
    "prompt_lookup": OPTIONAL_BOOLEAN,
    "max_model_len": whole(1, optional=True),
    "drawn_chains_from": FieldCheck(
        lambda value: value in (None, NEVER) or (is_number(value) and 0 <= value < math.inf),
        'a temperature of at least 0, "never", or none',
    ),
    "draft_window": FieldCheck(
        whole(0, optional=True).accepts, "a whole number, 0 for no window, or none"
    ),
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made, with the field names of vLLM's speculative configuration.

    Attributes:
        method: "eagle3" drafts with a head (P-EAGLE heads too), "ngram" looks the drafts up in
            the tokens so far (prompt lookup).
        model: folder or hub id of the draft head; none for "ngram".
        revision: branch, tag or commit of a hub id.
        num_speculative_tokens: K, the draft tokens per step. None takes what the head was trained
            for, at most 7, once the head is found (`models.head_json`); else 7.
        num_speculative_tokens_per_batch_size: (first, last, K) for numbers of sequences that run
            together, ascending, like ((1, 16, 7), (17, 64, 0)): a busy card pays for every token
            that it verifies. K = 0 stops drafting (`engine.depth.ScheduledDepth` says when).
            Numbers between two ranges have the K of the one before; K is never above
            num_speculative_tokens. A sampled request with a seed and drawn drafts keeps its own K,
            so that its output does not depend on the load. "auto": where steps run as CUDA graphs
            and drafts are an argmax the engine chooses K itself (`engine.depth.AutomaticDepth`),
            and elsewhere K is always the same. None: K is always the same; where a head is named
            and num_speculative_tokens is None too, "auto" (`models.head_json`). Where drafts are
            trees, all this is about the nodes that a step verifies of each sequence, up to
            max_nodes, and not about their depth.
        parallel_drafting: draft all K in one pass; None takes what the head was trained for.
        parallel_drafting_spec: draft candidate trees of this shape instead of chains; K is then
            their depth. A mapping may leave keys of `CandidateTrees` out; it stays a mapping until
            the depth is known, from K or from the head, and the width, from the head. "auto": trees
            of the default shape where steps run as CUDA graphs, and chains elsewhere. None: chains;
            where a head is named and nothing else gives K, "auto" (`models.head_json`).
        draft_sampling: "argmax" drafts, or "probabilistic" ones drawn at the request's temperature.
            With drawn drafts the output of a seed depends on K and head.
        drawn_chains_from: where drafts are trees, the temperature from which a chain of drawn
            drafts leads the tree of a sampled request, which is accepted longer at high
            temperatures and shorter at low ones. Requests with a seed or a structured output keep
            trees without one, and "never" keeps such trees for all. P-EAGLE heads alone. None:
            DRAWN_CHAINS_FROM for their trees (`with_trees`).
        prompt_lookup: where drafts are trees, let continuations of the text join them: what stood
            behind earlier occurrences of a path's last tokens (`kernels.trees.copies`). Such paths
            may be deeper than the head drafts. True without `parallel_drafting_spec`: head and text
            share trees of K nodes. None: yes where drafts are trees. A request may say no.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that is looked for. None:
            4 and 1 for "ngram", and 16 and 2 where drafts are trees; there more than 16 tokens
            count as 16.
        quantization: type that the weights of the head's layers get when they are loaded; None
            takes them as they are stored.
        check_target: refuse a head whose fingerprint names another target.
        correction: use the correction that lies beside the head, if there is one (`peagle train
            --correction-on`): each draft then knows the one before it.
        corrections: further corrections of the head by name, each a file or the folder with it. A
            request chooses one (`SamplingParams.correction`); the others have that beside the head,
            or none. A mapping, kept as pairs.
        max_model_len: positions up to which a head drafts; longer sequences go on without drafts.
            None takes the length that the head was trained for.
        draft_window: how many tokens a position of the head attends to, itself and those before
            it, in every layer; 0: all. None takes the windows of the head's config.json
            (`layer_types`, `sliding_window`), else the longest sequence of the head's training
            where its config.json has it (`max_sequence_length_trained`), else all: above all mask
            slots draft badly if they attend to more tokens than in training
            (docs/lab/benchmark-model.md). Of a longer prompt the head reads the last tokens only,
            but for requests with a seed whose drafts are drawn: so many as the window has, or as
            the layers of config.json reach back together.
        synthetic_acceptance_rates: r_1 to r_K; at least the first i drafts are accepted with
            probability r_i, whatever they are. The output is then NOT the model's own: for
            measuring speed only, with heads that cannot draft (random weights). None: acceptance
            is real.

    Raises:
        UserError: a value is out of range or the combination makes no sense.
    """

    method: Method = "eagle3"
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: (
        tuple[tuple[int, int, int], ...] | Literal["auto"] | None
    ) = None
    parallel_drafting: bool | None = None
    parallel_drafting_spec: TreeShape | None = None
    draft_sampling: DraftSampling = "argmax"
    drawn_chains_from: float | Literal["never"] | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    quantization: Quantization | None = None
    check_target: bool = True
    correction: bool = True
    corrections: tuple[tuple[str, str], ...] = ()
    prompt_lookup: bool | None = None
    max_model_len: int | None = None
    draft_window: int | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        require(
            k is None or (is_int(k) and 1 <= k <= MAX_SPECULATIVE_TOKENS),
            "num_speculative_tokens",
            k,
            f"a whole number from 1 to {MAX_SPECULATIVE_TOKENS}",
            "To decode without drafts, leave the speculative configuration out (--no-speculation).",
        )
        check_fields(self, _CHECKS)
        if self.method == "eagle3":
            if isinstance(self.model, Path):
                object.__setattr__(self, "model", str(self.model))
            ok = isinstance(self.model, str) and bool(self.model)
            require(ok, "model", self.model, "the folder of a draft head, or its hub id")
            self._read_corrections(self.corrections)
        else:
            self._check_lookup()
        if self.parallel_drafting_spec is not None:
            self._check_trees(self.parallel_drafting_spec, _TREES)
        elif self.prompt_lookup and self.method != "ngram":
            # K drafts of head and text together are a tree of K nodes.
            self._check_trees({"max_nodes": min(k or DEFAULT_K, MAX_TREE_NODES)}, "prompt_lookup")
        elif (first := self.drawn_chains_from) not in (None, NEVER):
            expected = f'"{NEVER}" or none without {_TREES}'
            remedy = f'Set {_TREES} to "{AUTO}" too.' if self.method != "ngram" else "Leave it out."
            require(False, "drawn_chains_from", first, expected, remedy)
        self._check_lookup_lengths()
        if self.num_speculative_tokens_per_batch_size is not None:
            self._check_schedule(self.num_speculative_tokens_per_batch_size)
        if self.synthetic_acceptance_rates is not None:
            self._check_rates(self.synthetic_acceptance_rates)

    def _read_corrections(self, given: Any) -> None:
        expected = "names with a file or a folder each, like {'sql': 'heads/sql'}"
        pairs = given.items() if isinstance(given, Mapping) else given
        ok = isinstance(given, Mapping | Sequence) and not isinstance(given, str)
        ok = ok and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
        require(ok, "corrections", given, expected)
        kept = tuple((name, str(source)) for name, source in pairs)
        for name, source in kept:
            ok = isinstance(name, str) and _NAME.fullmatch(name) is not None
            require(ok, "corrections", name, "names of 1 to 64 letters, digits, ., - and _")
            require(bool(source), "corrections", source, expected)
        names = [name for name, _ in kept]
        require(len(set(names)) == len(names), "corrections", names, "each name once")
        object.__setattr__(self, "corrections", kept)

    def _check_trees(self, shape: TreeShape, setting: str) -> None:
        """Take trees of `shape`, for which `setting` asks; K is their depth.

        Raises:
            UserError: a setting does not go with trees.
        """
        k = self.num_speculative_tokens
        drawn, rates = self.draft_sampling, self.synthetic_acceptance_rates
        require(drawn == "argmax", "draft_sampling", drawn, f'"argmax" with {setting}')
        require(rates is None, "synthetic_acceptance_rates", rates, f"none with {setting}")
        if shape == AUTO:
            ok = k is None or k <= MAX_TREE_NODES
            expected = f'at most {MAX_TREE_NODES} with {setting} "{AUTO}"'
            require(ok, "num_speculative_tokens", k, expected, TREE_DEFAULTS)
            return
        trees = CandidateTrees.parse(shape, k or DEFAULT_K)
        assert not isinstance(shape, str)
        kept: TreeShape = trees
        if not isinstance(shape, CandidateTrees):
            given = {"prediction_depth": k} | {
                name: value for name, value in shape.items() if value is not None
            }
            if given["prediction_depth"] is None or "num_parallel_trees" not in given:
                kept = given
        object.__setattr__(self, _TREES, kept)
        depth = trees.prediction_depth
        expected = f"{depth}, the prediction_depth of {_TREES}, or none"
        if not isinstance(shape, CandidateTrees) and shape.get("prediction_depth") is None:
            expected = f"at most {depth}, the most nodes of a tree, or none"
        require(k in (None, depth), "num_speculative_tokens", k, expected, "Leave it out.")

    def _check_lookup(self) -> None:
        for name in (_TREES, "model", "revision", "quantization", "max_model_len", "draft_window"):
            value = getattr(self, name)
            require(value is None, name, value, f'no {name} with method "ngram"')
        require(self.correction, "correction", False, 'true, or none, with method "ngram"')
        many = self.corrections
        require(not many, "corrections", many, 'none with method "ngram"')
        no = self.prompt_lookup
        require(no is not False, "prompt_lookup", no, 'true, or none, with method "ngram"')

    def _check_lookup_lengths(self) -> None:
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        ok = longest is None or (is_int(longest) and longest >= 1)
        require(ok, "prompt_lookup_max", longest, "a whole number of at least 1")
        most = longest or self.lookup_lengths[0]
        ok = shortest is None or (is_int(shortest) and 1 <= shortest <= most)
        require(ok, "prompt_lookup_min", shortest, f"1 to prompt_lookup_max ({most})")

    def _check_schedule(self, schedule: object) -> None:
        name = "num_speculative_tokens_per_batch_size"
        if schedule == AUTO:
            require(self.method != "ngram", name, schedule, 'ranges or none with method "ngram"')
            return
        ranges: Any = schedule
        if isinstance(schedule, Mapping):
            ranges = [_range(sizes, k) for sizes, k in schedule.items()]
        ok = isinstance(ranges, list | tuple) and bool(ranges)
        ok = ok and all(isinstance(r, list | tuple) and len(r) == 3 for r in ranges)
        ok = ok and all(is_int(number) for r in ranges for number in r)
        expected = 'ranges of batch sizes with their K, like [[1, 16, 7], [17, 64, 4]], or "auto"'
        require(ok, name, schedule, expected)
        ok = all(1 <= first <= last and k >= 0 for first, last, k in ranges)
        require(ok, name, schedule, "batch sizes from 1, last not below first, and K of at least 0")
        ok = all(one[1] < other[0] for one, other in pairwise(ranges))
        require(ok, name, schedule, "ascending ranges that do not overlap")
        object.__setattr__(self, name, tuple(map(tuple, ranges)))

    @property
    def draws(self) -> bool:
        """Return whether drafts of some requests are drawn."""
        return self.draft_sampling != "argmax" or self.drawn_chains_from not in (None, NEVER)

    @property
    def trees(self) -> CandidateTrees | None:
        """Return the shape of the candidate trees, with its defaults; None: chains."""
        shape = self.parallel_drafting_spec
        return None if shape in (None, AUTO) else CandidateTrees.parse(shape)

    def settled(self, *, is_captured: bool, parallel: bool) -> SpeculativeConfig:
        """Return the configuration with "auto" trees decided: the default shape, or chains.

        Args:
            is_captured: whether steps run as CUDA graphs.
            parallel: whether the head is a P-EAGLE head.
        """
        if self.parallel_drafting_spec != AUTO:
            return self
        if not is_captured:
            return replace(self, parallel_drafting_spec=None, drawn_chains_from=None)
        shape = {}
        if not parallel and self.k > 1:
            shape["num_parallel_trees"] = min(DEFAULT_BEAM, MAX_BEAM_ROWS // (self.k - 1))
        trees = CandidateTrees.parse(shape, self.k, parallel=parallel)
        return self.with_trees(trees, parallel=parallel)

    def with_trees(self, trees: CandidateTrees, *, parallel: bool) -> SpeculativeConfig:
        """Return the configuration with these trees.

        Drawn chains lead those of a P-EAGLE head unless the configuration says otherwise.
        """
        first = self.drawn_chains_from
        if first is None:
            first = DRAWN_CHAINS_FROM if parallel else NEVER
        return replace(self, parallel_drafting_spec=trees, drawn_chains_from=first)

    @property
    def copies_join_trees(self) -> bool:
        """Return whether continuations of the text join the head's trees."""
        return self.trees is not None and self.prompt_lookup is not False

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """Return the most tokens that a lookup compares, and the fewest that are a match."""
        if self.method == "ngram":
            longest = self.prompt_lookup_max or 4
            return longest, self.prompt_lookup_min or 1
        longest = min(self.prompt_lookup_max or _MAX_COPY_MATCH, _MAX_COPY_MATCH)
        return longest, min(self.prompt_lookup_min or 2, longest)

    @property
    def k(self) -> int:
        """Return K, the number of draft tokens per step; of trees the depth."""
        trees = self.trees
        depth = DEFAULT_K if trees is None else trees.prediction_depth
        return self.num_speculative_tokens or depth

    @property
    def num_verified(self) -> int:
        """Return the most drafts of a sequence that a step verifies: K, or the nodes of a tree."""
        trees = self.trees
        return self.k if trees is None else trees.max_nodes

    def tokens_for(self, batch_size: int) -> int:
        """Return the drafts that a step verifies of each of so many sequences that run together.

        They are K, or the nodes of trees; the most for "auto".
        """
        k = most = self.num_verified
        schedule = self.num_speculative_tokens_per_batch_size or ()
        for first, _, scheduled in () if schedule == AUTO else schedule:
            if first <= batch_size:
                k = min(scheduled, most)
        return k

    def _check_rates(self, rates: Sequence[float]) -> None:
        name, k = "synthetic_acceptance_rates", self.k
        remedy = "Rate i is the probability that at least the first i drafts are accepted."
        expected = f"a list of {k} numbers, one for each of num_speculative_tokens"
        ok = isinstance(rates, list | tuple) and len(rates) == k
        require(ok, name, rates, expected, remedy)
        ok = all(is_number(rate) and 0 <= rate <= 1 for rate in rates)
        require(ok, name, rates, "probabilities from 0 to 1", remedy)
        ok = all(later <= rate for rate, later in pairwise(rates))
        require(ok, name, rates, "no rate above the one before it", remedy)
        object.__setattr__(self, name, tuple(map(float, rates)))

    @classmethod
    def parse(cls, source: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Read vLLM's form of the configuration, from JSON text or a mapping.

        Keys are the attributes' names and vLLM's: `draft_sample_method` ("greedy" or
        "probabilistic") is its name of `draft_sampling`; `enforce_eager`,
        `disable_padded_drafter_batch` and `use_local_argmax_reduction` are accepted and change
        nothing here, as is `draft_tensor_parallel_size` 1; `rejection_sample_method` "synthetic"
        goes with `synthetic_acceptance_rates`, and "standard" without. Null stands for the default.
        All else is refused.

        Raises:
            UserError: the text is not a JSON object, or a key or value is not understood.
        """
        if isinstance(source, SpeculativeConfig):
            return source
        return cls(**speculative_keys(source))


def chains_lead(first: float | Literal["never"] | None, temperature: float) -> bool:
    """Return whether `drawn_chains_from` lets drawn chains lead trees at a temperature."""
    return first is not None and first != NEVER and temperature >= first


def speculative_keys(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SpeculativeConfig from vLLM's form, see `SpeculativeConfig.parse`.

    Raises:
        UserError: not a JSON object, an unknown key, or a value of vLLM that has no equal here.
    """
    data = _json(source) if isinstance(source, str) else source
    if not isinstance(data, Mapping):
        raise UserError(f"The speculative configuration is {data!r}; expected a JSON object.")
    known = {field.name for field in fields(SpeculativeConfig)}
    vllm = {*_WITHOUT_EFFECT, "draft_sample_method", "rejection_sample_method"}
    if unknown := sorted(set(map(str, data)) - known - vllm):
        nested = {f"{_TREES}.{field.name}" for field in fields(CandidateTrees)}
        raise UserError(
            f"Unknown key {unknown[0]!r} in the speculative configuration; "
            f"known keys: {', '.join(sorted(known))}; of vLLM also {', '.join(sorted(vllm))}."
            f"{did_you_mean(unknown[0], sorted(known | vllm | nested))}"
        )
    given = {key: value for key, value in data.items() if value is not None}
    if given.get(_TREES, AUTO) != AUTO:
        CandidateTrees.parse(given[_TREES])
    for key, allowed in _WITHOUT_EFFECT.items():
        expected, value = " or ".join(map(json.dumps, allowed)), given.pop(key, allowed[0])
        require(value in allowed, key, value, expected, "This engine has no other: leave it out.")
    if "draft_sample_method" in given:
        method = given.pop("draft_sample_method")
        expected = " or ".join(map(json.dumps, _DRAFT_SAMPLE_METHODS))
        require(method in [*_DRAFT_SAMPLE_METHODS], "draft_sample_method", method, expected)
        sampling = _DRAFT_SAMPLE_METHODS[method]
        if given.setdefault("draft_sampling", sampling) != sampling:
            raise UserError(
                f"draft_sample_method {method!r} and draft_sampling {given['draft_sampling']!r} "
                "contradict each other; leave one of them out."
            )
    if "rejection_sample_method" in given:  # the rates imply it
        _check_rejection_sampling(given.pop("rejection_sample_method"), given)
    return given


def _check_rejection_sampling(method: object, given: Mapping[str, Any]) -> None:
    expected = " or ".join(map(json.dumps, _REJECTION_SAMPLE_METHODS))
    require(method in _REJECTION_SAMPLE_METHODS, "rejection_sample_method", method, expected)
    rates = given.get("synthetic_acceptance_rates")
    if method == "synthetic" and rates is None:
        raise UserError(
            "rejection_sample_method is 'synthetic', without synthetic_acceptance_rates; expected "
            "one rate for each of num_speculative_tokens, like [0.7, 0.5, 0.3]. Add them."
        )
    if method != "synthetic" and rates is not None:
        raise UserError(
            f"rejection_sample_method {method!r} and synthetic_acceptance_rates {rates!r} "
            "contradict each other; leave one of them out."
        )


def _range(sizes: object, k: object) -> tuple[Any, ...]:
    """Return ("1-16", 7) as (1, 16, 7); () where it is not of that form."""
    first, dash, last = str(sizes).partition("-")
    is_range = first.isdecimal() and (last if dash else first).isdecimal()
    return (int(first), int(last if dash else first), k) if is_range else ()


def _json(text: str) -> Any:
    source = "The speculative configuration"
    try:
        return json.loads(text, object_pairs_hook=unique_keys(source))
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON: {error}.") from None
