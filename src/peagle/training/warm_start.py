"""A head that starts from another one (`head.init`) in place of random weights.

From an EAGLE-3 head to a P-EAGLE head: all that both have is taken over. Added layers begin with
residual branches of zero, so that depth 0, which never sees a mask slot, gives at first exactly
what the EAGLE-3 head gave. From a P-EAGLE head to one for a fine-tuned target: everything is taken
over, the vocabulary map included. The target may have other weights, but not other tokens.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.data.dataset import ResponseDataset
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint import StoredHead, read_head, split_tensors
from peagle.models.checkpoint.head import check_fits, kept_tokens
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint, same_tokenizer
from peagle.models.target import TargetModel
from peagle.models.target_facts import TargetFacts, TargetSizes
from peagle.training.config import HeadSection
from peagle.training.vocabulary import Coverage, vocabulary_report

# A map that holds less of the training responses deserves a word: the rest is never drafted.
_WANTED_COVERAGE = 0.8
# Options of [head] that the init head decides; its configuration has the same names.
_INHERITED_OPTIONS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "draft_vocab_size",
    "aux_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "qk_norm",
)
# Sequences whose features are averaged: some thousands of tokens, a moment of the target's time.
_NUM_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The head that a run started from, for its record.

    Attributes:
        name: folder of the init head, its last two parts.
        kind: "P-EAGLE" or "EAGLE-3".
        sha256: of each of its weight files, by name.
        target: name of the target that it was trained for, None if unknown.
        trained_depth: K that it was trained for, None if unknown.
        trained_length: tokens of the longest sequence it was trained on, None if unknown.
        num_layers, num_added_layers: layers taken and layers added.
        num_taken, fresh, dropped: checkpoint tensors taken over; names of those that are new, and
            of those that the new head has no use for.
        differences: how the target differs from the one that the head was trained for.
        coverage: training responses within the head's draft vocabulary, None if it holds all.
        warnings: possible mistakes.
    """

    name: str
    kind: str
    sha256: dict[str, str]
    target: str | None
    trained_depth: int | None
    trained_length: int | None
    num_layers: int
    num_added_layers: int
    num_taken: int
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]
    differences: tuple[str, ...]
    coverage: Coverage | None
    warnings: tuple[str, ...]

    @property
    def mask_hidden_is_new(self) -> bool:
        """Return whether the head it started from has no `mask_hidden`."""
        return "mask_hidden" in self.fresh

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {name: list(value) for name, value in plain.items() if isinstance(value, tuple)}
        coverage = self.coverage.to_json() if self.coverage else None
        return {**plain, **lists, "coverage": coverage}

    def __str__(self) -> str:
        trained_for = f" trained for {self.target!r}" if self.target else ""
        lines = [
            f"warm start: {self.kind} head {self.name!r}{trained_for}, {self.num_taken} tensors "
            f"taken, {len(self.fresh)} new ({self.num_added_layers} added layers)"
        ]
        if self.differences:
            lines.append(f"its target and this one differ: {'; '.join(self.differences)}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


@dataclass(frozen=True, slots=True)
class InitHead:
    """A head to start from, checked against the target that it will draft for.

    Attributes:
        folder: where it was read.
        config: its shape.
        tensors: its tensors under their checkpoint names, quantised ones unpacked.
        from_target: names of the tensors that are its target's.
        target: name of the target that it was trained for, None if unknown.
        trained_length: tokens of the longest sequence it was trained on, None if unknown.
        differences: how that target differs from the one at hand.
        warnings: facts that could not be checked.
    """

    folder: Path
    config: DrafterConfig
    tensors: dict[str, Tensor]
    from_target: tuple[str, ...]
    target: str | None
    trained_length: int | None
    differences: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, target: TargetFacts) -> Self:
        """Read a head in either style.

        Raises:
            UserError: there is none, it is broken, or it is one for other tokens, another tokenizer
                or other features than the target has.
        """
        init, head = cls._read_config(folder, target)
        differences, warnings = _compare(head.fingerprint, target, folder)
        try:
            tensors, _ = head.read_tensors(folder)
        except CheckpointError as error:
            raise UserError(f"head.init: {error}") from None
        return dataclasses.replace(
            init, tensors=tensors, differences=differences, warnings=warnings
        )

    @classmethod
    def shape_of(cls, folder: Path, target: TargetSizes) -> Self:
        """Read the head's config alone, for `shape`: no tensors, no comparison of tokenizers."""
        return cls._read_config(folder, target)[0]

    @classmethod
    def _read_config(cls, folder: Path, target: TargetSizes) -> tuple[Self, StoredHead]:
        try:
            head = read_head(folder, num_target_layers=target.num_layers)
            _ = head.fingerprint  # refuses one that is not readable
            from_target, longest = head.from_target, head.trained_length
            check_fits(head.config, target, str(folder))
        except UserError as error:
            inner = folder / "head"
            hint = f" Did you mean {str(inner)!r}?" if (inner / "config.json").is_file() else ""
            raise UserError(
                f"head.init: {error}{hint} Leave head.init out to train a new head."
            ) from None
        init = cls(folder, head.config, {}, from_target, head.target_name, longest, (), ())
        return init, head

    def shape(self, section: HeadSection, depth: int, mask_token_id: int | None) -> DrafterConfig:
        """Return the shape of the head that starts from this one and is trained to `depth`.

        `mask_token_id` is None for an EAGLE-3 head; a P-EAGLE head keeps its own.

        Raises:
            UserError: the section contradicts the head.
        """
        given = {name for name in section.model_fields_set if getattr(section, name) is not None}
        for name in _INHERITED_OPTIONS:
            self._check_given(section, name, name in given)
        if mask_token_id is not None and self.config.is_parallel:
            self._check_given(section, "mask_token_id", "mask_token_id" in given)
            mask_token_id = self.config.mask_token_id
        num_layers = section.num_layers if "num_layers" in given else self.config.num_layers
        if num_layers < self.config.num_layers:
            raise UserError(
                f"head.num_layers is {num_layers}, but the head {str(self.folder)!r} of head.init "
                f"has {self.config.num_layers} layers; expected as many or more. Leave "
                "head.num_layers out, or leave head.init out to train a new head."
            )
        return dataclasses.replace(
            self.config, num_layers=num_layers, mask_token_id=mask_token_id, trained_depth=depth
        )

    def _check_given(self, section: HeadSection, name: str, is_given: bool) -> None:
        wanted, has = getattr(section, name), getattr(self.config, name)
        if is_given and wanted != has:
            raise UserError(
                f"head.{name} is {_toml_text(wanted)}, but the head {str(self.folder)!r} of "
                f"head.init has {_toml_text(has)}. Leave head.{name} out, or leave head.init out "
                "to train a new head."
            )

    def draft_ids(self) -> Tensor | None:
        """Return the target id of every draft id; None where the head drafts the whole vocabulary.

        The rows of lm_head that the head lacks are the target's at these ids.
        """
        if not self.config.is_pruned:
            return None
        return torch.arange(self.config.draft_vocab_size) + self.tensors["d2t"]

    @torch.no_grad()
    def put_into(self, drafter: Drafter) -> None:
        """Copy the tensors into a new head of the shape `shape` gave; added layers add nothing."""
        tensors = dict(self.tensors)
        if drafter.config.is_pruned:  # the file may leave it out
            tensors["t2d"] = kept_tokens(tensors["d2t"], drafter.config)
        for name, place in split_tensors(drafter):  # views of the parameters
            if name in tensors:
                place.copy_(tensors[name])
        for layer in drafter.layers[self.config.num_layers :]:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr]

    def record(
        self, drafter: Drafter, dataset: ResponseDataset, always: Collection[int]
    ) -> WarmStart:
        """Return the record of the warm start, with the facts that its user should look at twice.

        `always` are the tokens that a new head would keep whatever their count.
        """
        names = {name for name, _ in split_tensors(drafter)}
        fresh = tuple(sorted(names - self.tensors.keys() - {"t2d"}))
        report = vocabulary_report(drafter, dataset)
        coverage = report.training if report else None
        weights = sorted(self.folder.glob("*.safetensors"))
        return WarmStart(
            name="/".join(self.folder.absolute().parts[-2:]),
            kind=self.config.kind,
            sha256={file.name: sha256_of(file) for file in weights},
            target=self.target,
            trained_depth=self.config.trained_depth,
            trained_length=self.trained_length,
            num_layers=self.config.num_layers,
            num_added_layers=drafter.config.num_layers - self.config.num_layers,
            num_taken=len(names) - len(fresh),
            fresh=fresh,
            dropped=tuple(sorted(self.tensors.keys() - names)),
            differences=self.differences,
            coverage=coverage,
            warnings=(*self.warnings, *_warnings(self, drafter, dataset, fresh, coverage, always)),
        )


# ---- what is refused ----


def _compare(
    fingerprint: TargetFingerprint | None, target: TargetFacts, folder: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the differences between the head's own target and this one, and facts unchecked."""
    if fingerprint is None:
        return (), (
            "the head does not say which target and tokenizer it was trained with; make sure that "
            "they had the same tokens",
        )
    here = TargetFingerprint.of(target, tokens=False)
    digests = (fingerprint.tokenizer_sha256, here.tokenizer_sha256)
    same = same_tokenizer(*digests, fingerprint.tokens_sha256, Path(target.name))
    if same is None:
        whose = "the head" if digests[0] is None else "the target"
        warnings = (
            f"{whose} has no tokenizer.json to compare; make sure that the tokens are the same",
        )
    elif not same:
        raise UserError(
            f"head.init: the head {str(folder)!r} was trained with another tokenizer: the SHA-256 "
            f"of tokenizer.json was {digests[0]}, that of {target.name!r} is {digests[1]}. If the "
            f"tokens are the same and the file was only saved anew, copy the tokenizer.json of "
            f"{fingerprint.name!r} into the target's folder; else leave head.init out."
        )
    else:
        warnings = ()
    differences = []
    if fingerprint.name != here.name:
        differences.append(f"it was {fingerprint.name!r} and is {here.name!r}")
    for name in ("vocab_size", "hidden_size", "num_layers"):
        before, now = getattr(fingerprint, name), getattr(here, name)
        if before != now:
            differences.append(f"{name} was {before} and is {now}")
    # float16 flushes small bfloat16 values, so the hash cannot be compared.
    if fingerprint.lm_head_sha256 != here.lm_head_sha256 and target.dtype != torch.float16:
        differences.append("the weights of lm_head are others")
    return tuple(differences), warnings


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


# ---- what is warned of ----


def _warnings(
    init: InitHead,
    drafter: Drafter,
    dataset: ResponseDataset,
    fresh: tuple[str, ...],
    coverage: Coverage | None,
    always: Collection[int],
) -> list[str]:
    before, now = init.config, drafter.config
    warnings = [
        f"the head has no {name} of its own: it starts as the target's, which is what serving "
        "gives such a head"
        for name in ("embed_tokens.weight", "lm_head.weight")
        if name in fresh and name not in init.from_target
    ]
    depth, trained = now.trained_depth, before.trained_depth
    if before.is_parallel and trained is not None and depth is not None and depth < trained:
        warnings.append(
            f"the head was trained to depth {trained} and method.depth is {depth}: what it knows "
            "of deeper positions will fade"
        )
    mask = now.mask_token_id
    if mask is not None and (count := int((dataset.tokens == mask).sum())):
        warnings.append(
            f"the mask token {mask} occurs {count:,} times in the training data; expected one that "
            "no text uses, since its embedding now stands for both"
        )
    if coverage is not None and coverage.share < _WANTED_COVERAGE:
        warnings.append(
            f"the head's draft vocabulary covers {coverage.share:.1%} of the training responses; "
            "what lies outside is never drafted. For other text than it was made for, train a new "
            "head (leave head.init out)"
        )
    missing = sorted(set(always) - set(drafter.target_ids().tolist())) if coverage else []
    if missing:
        warnings.append(
            f"the head's draft vocabulary lacks tokens that a new head would keep (ends of text, "
            f"special tokens), {len(missing)} in all, {missing[0]} for one: they are never drafted"
        )
    return warnings


# ---- the shared state of mask slots ----


@torch.no_grad()
def start_mask_hidden(
    drafter: Drafter, dataset: ResponseDataset, features_of: Callable[[int], Tensor]
) -> None:
    """Let `mask_hidden` begin as the mean of the target's features over the first responses.

    For a head whose other weights know features already: fc of the mean is the mean of what fc
    gives, so that a mask slot looks to the layers like an average place. A random vector does not,
    and zeros hide behind a norm before fc; both learn more slowly. `features_of` gives the features
    of a whole sequence of the dataset, by number, [T, A * H].
    """
    assert drafter.mask_hidden is not None
    kept: list[Tensor] = []
    for index in range(min(_NUM_SEQUENCES, len(dataset))):
        features_TA = features_of(index)
        begin, end = dataset.start_loc[index : index + 2].tolist()
        # The first positions of a text may hold huge values that no other has.
        is_response_T = dataset.loss_mask[begin:end].to(features_TA.device)
        kept.append(features_TA[is_response_T].double())
    drafter.mask_hidden.copy_(torch.cat(kept).mean(0))


def features_by(
    target: TargetModel, dataset: ResponseDataset, aux_layer_ids: tuple[int, ...]
) -> Callable[[int], Tensor]:
    """Return a function for `start_mask_hidden` that computes features with the target."""
    target.tap_aux(aux_layer_ids)

    def features_of(index: int) -> Tensor:
        begin, end = dataset.start_loc[index : index + 2].tolist()
        tokens_T = dataset.tokens[begin:end].long().to(target.device)
        positions_T = torch.arange(end - begin, device=target.device)
        return target.forward(tokens_T, positions_T, DenseCausalAttention(1))[1]

    return features_of
