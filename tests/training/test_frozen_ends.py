"""Runs that keep the embeddings and lm_head of a head as they start: as the target's rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.errors import UserError
from peagle.models.checkpoint import compact_head
from peagle.training.reporting import TrainingReport
from peagle.training.start_checks import least_sizes
from peagle.training.trainer import Trainer
from peagle.training.training_plan import make_plan
from tests.conftest import make_target_folder
from tests.training.runs import make_config, read_checkpoint, write_responses

FROZEN = {"freeze_embeddings": True, "freeze_lm_head": True}
ENDS = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def own_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return make_target_folder(folder, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def own_responses(own_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_responses(own_target, tmp_path_factory.mktemp("data") / "responses.jsonl")


def target_rows(target: Path, trainer: Trainer) -> dict[str, Tensor]:
    """The rows as they lie in the target's file; lm_head's by the map of the draft vocabulary."""
    stored = load_file(target / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    d2t = trainer.drafter.d2t
    assert d2t is not None
    ids = [number + int(offset) for number, offset in enumerate(d2t)]
    return {ENDS[0]: embedding, ENDS[1]: stored.get("lm_head.weight", embedding)[ids]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [{"name": "peagle"}, {"name": "eagle3", "depth": 3}], ids=lambda m: m["name"]
)
def test_frozen_rows_stay_the_targets_and_the_rest_learns(
    own_target: Path, own_responses: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    reports: list[TrainingReport] = []
    trainer = Trainer(
        make_config(
            own_target,
            own_responses,
            tmp_path,
            head={"draft_vocab_size": 60, **FROZEN},
            method=method,
            run={"validate_every": 10},
            optimizer={"steps": 20, "name": "muon", "weight_decay": 0.1},
        ),
        reports.append,
    )
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    record = trainer.run()
    rows, after = target_rows(own_target, trainer), dict(trainer.drafter.named_parameters())
    for name, parameter in after.items():
        if name in ENDS:
            assert torch.equal(parameter, rows[name]) and parameter.grad is None
        else:
            assert not torch.equal(parameter, before[name]), name
    losses = [report.loss for report in reports if report.kind == "validation"]
    assert losses[-1] < 0.97 * losses[0]
    assert record["steps"] == 20
    moments = [n for n in read_checkpoint(tmp_path) if "optimizer." in n and n.endswith(ENDS)]
    assert not moments


@pytest.mark.parametrize("freeze", [(True, False), (False, True)])
def test_each_end_is_frozen_by_itself(
    target_folder: Path, responses: Path, tmp_path: Path, freeze: tuple[bool, bool]
) -> None:
    head = dict(zip(FROZEN, freeze, strict=True))
    config = make_config(target_folder, responses, tmp_path, head=head, optimizer={"steps": 2})
    trainer = Trainer(config)
    before = [dict(trainer.drafter.named_parameters())[name].detach().clone() for name in ENDS]
    trainer.run()
    after = [dict(trainer.drafter.named_parameters())[name] for name in ENDS]
    stayed = tuple(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert stayed == freeze


def test_bfloat16_rows_are_the_targets_too(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """Of a head that computes in bfloat16, as on a GPU; its other weights move in float32."""
    config = make_config(
        target_folder,
        responses,
        tmp_path,
        head={"draft_vocab_size": 60, **FROZEN},
        optimizer={"steps": 2},
        run={"precision": "bfloat16"},
    )
    trainer = Trainer(config)
    trainer.run()
    rows = target_rows(target_folder, trainer)
    for name in ENDS:
        parameter = trainer.drafter.get_parameter(name)
        assert torch.equal(parameter, rows[name].bfloat16())
    assert {name for name, _ in trainer.masters.named()}.isdisjoint(ENDS)


def test_a_resumed_run_freezes_the_same(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, responses, tmp_path, optimizer={"steps": 2})
    Trainer(config).run()
    frozen = config.head.model_copy(update={"freeze_lm_head": True})
    with pytest.raises(UserError, match=r"head.freeze_lm_head None \(now True\)"):
        Trainer(config.model_copy(update={"head": frozen})).run(resume=True)


def test_a_narrow_head_has_no_rows_of_the_target(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    head = {"hidden_size": 16, "num_attention_heads": 2, "num_kv_heads": 2, **FROZEN}
    with pytest.raises(UserError, match=r"freeze_lm_head is true and head.hidden_size is 16; exp"):
        Trainer(make_config(target_folder, responses, tmp_path, head=head))


# ---- what is stored ----


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"name": "peagle"}, {"name": "eagle3", "depth": 3}])
def test_a_head_without_its_ends_serves_as_validated(
    target_folder: Path, responses: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    reports: list[TrainingReport] = []
    config = make_config(
        target_folder,
        responses,
        tmp_path,
        head=FROZEN,
        method=method,
        optimizer={"steps": 30, "learning_rate": 6e-3},
    )
    disk = make_plan(config).disk
    Trainer(config, reports.append).run()
    file = tmp_path / "head" / "model.safetensors"
    assert not set(ENDS) & set(load_file(file))
    assert 0 <= file.stat().st_size - disk["head"] < 4096
    least = least_sizes(config)
    assert least is not None and least[1] <= disk["head"]

    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    speculative = {"model": str(tmp_path / "head"), "num_speculative_tokens": config.method.depth}
    llm = LLM(target_folder, speculative_config=speculative, max_num_seqs=48)
    llm.generate(
        [row["prompt_token_ids"] for row in rows], SamplingParams(max_tokens=24, ignore_eos=True)
    )
    promised = [r for r in reports if r.kind == "validation"][-1].acceptance_lengths[-1]
    assert promised > 1.1
    served = llm.engine.stats.speculation.acceptance_length
    assert abs(served - promised) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_run_goes_on_from_a_compact_head(
    target_folder: Path, responses: Path, tmp_path: Path, quantization: Any
) -> None:
    """Its ends are the target's again: frozen ones stay so, and are not stored; others are."""
    head = {"draft_vocab_size": 60, **FROZEN}
    config = make_config(target_folder, responses, tmp_path, head=head, optimizer={"steps": 4})
    first = Trainer(config)
    first.run()
    compact_head(tmp_path / "head", tmp_path / "c", quantization=quantization, group_size=16)
    for name, frozen in (("frozen", FROZEN), ("free", {})):
        init = {"init": tmp_path / "c", **frozen}
        again = Trainer(
            make_config(
                target_folder, responses, tmp_path / name, head=init, optimizer={"steps": 1}
            )
        )
        assert again.warm_start is not None and not again.warm_start.warnings
        rows = target_rows(target_folder, again)
        for end in ENDS:
            assert torch.equal(again.drafter.get_parameter(end), rows[end])
        assert torch.equal(again.drafter.target_ids(), first.drafter.target_ids())
        again.run()
        stored = load_file(tmp_path / name / "head" / "model.safetensors")
        assert set(ENDS) <= set(stored) if name == "free" else not set(ENDS) & set(stored)


@pytest.mark.slow
def test_ends_of_an_init_head_that_are_not_the_targets_are_stored(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    free = make_config(target_folder, responses, tmp_path / "free", optimizer={"steps": 2})
    Trainer(free).run()
    before = load_file(tmp_path / "free" / "head" / "model.safetensors")
    head = {"init": tmp_path / "free" / "head", **FROZEN}
    config = make_config(
        target_folder, responses, tmp_path / "on", head=head, optimizer={"steps": 2}
    )
    Trainer(config).run()
    after = load_file(tmp_path / "on" / "head" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in ENDS)
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
