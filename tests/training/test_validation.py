"""What a validation says of a head, against serving it and against the plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.data.batches import ValidationStream
from peagle.data.features import target_states
from peagle.models.target import TargetModel
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer
from tests.conftest import make_target_folder
from tests.training.runs import make_config, write_rows

RESPONSE = 64


@pytest.fixture(scope="module")
def sharp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose likely tokens are likely at temperature 1 too."""
    folder = make_target_folder(tmp_path_factory.mktemp("sharp"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 12
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sampled_responses(llm: LLM, count: int, seed: int) -> list[dict[str, list[int]]]:
    """Responses drawn at temperature 1 from prompts that repeat, as rows of a data file."""
    generator = torch.Generator().manual_seed(5)
    some = [torch.randint(2, 300, (6,), generator=generator).tolist() for _ in range(8)]
    prompts = [some[i % len(some)] for i in range(count)]
    params = [
        SamplingParams(max_tokens=RESPONSE, ignore_eos=True, temperature=1.0, seed=seed + i)
        for i in range(count)
    ]
    return [
        {"prompt_token_ids": prompt, "response_token_ids": output.token_ids}
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True)
    ]


@pytest.fixture(scope="module")
def sampled(sharp_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of sampled responses: to train on, and to validate on."""
    llm, folder = LLM(sharp_target, max_num_seqs=120), tmp_path_factory.mktemp("sampled")
    train = write_rows(folder / "train.jsonl", sampled_responses(llm, 48, seed=0))
    return train, write_rows(folder / "other.jsonl", sampled_responses(llm, 120, seed=1_000))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_sampled_acceptance_is_what_serving_gives(
    sharp_target: Path, sampled: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    """At temperature 1, to 0.06: three standard errors of some 4,500 drafts."""
    train, other = sampled
    config = make_config(
        sharp_target,
        train,
        tmp_path / "run",
        head={"num_layers": 1, "draft_vocab_size": 200},
        method={"name": method},
        optimizer={"steps": 80, "learning_rate": 1e-2},
        data={"validation": other, "batch_tokens": 560},
        run={"validation_batches": 99, "validate_every": 80, "select": "sampled"},
    )
    best = Trainer(config).run()["best"]
    report = best["validation"]
    speculative = {"model": str(tmp_path / "run" / "head"), "num_speculative_tokens": 4}
    serving = LLM(sharp_target, speculative_config=speculative, max_num_seqs=120)
    sampled_responses(serving, 120, seed=50_000)
    stats = serving.engine.stats.speculation
    assert report["temperature"] == 1 and best["temperature"] == 1
    assert best["acceptance_length"] == report["sampled_acceptance_lengths"][3]
    assert abs(stats.acceptance_length - best["acceptance_length"]) < 0.06
    served = [n / stats.num_drafts for n in stats.num_accepted_tokens_per_pos]
    assert served == pytest.approx(report["sampled_unconditional_acceptance_per_pos"], abs=0.04)
    # Neither of which is the greedy figure.
    assert stats.acceptance_length > 1.2
    assert report["acceptance_lengths"][3] > stats.acceptance_length + 0.12


@pytest.mark.slow
def test_elements_are_judged_by_the_response_and_the_target(
    sharp_target: Path, tmp_path: Path
) -> None:
    """Against the plain model's probabilities, element by element."""
    rows = sampled_responses(LLM(sharp_target), 8, seed=3)
    data = write_rows(tmp_path / "data.jsonl", rows)
    config = make_config(
        sharp_target,
        data,
        tmp_path / "run",
        head={"num_layers": 1, "draft_vocab_size": 100},
        data={"validation": data, "batch_tokens": 1024},
        run={"validation_temperature": 0.7, "validate_every": 30},
        optimizer={"steps": 30},
    )
    trainer = Trainer(config)
    trainer.run()
    batch = ValidationStream(trainer.dataset, 1024, 8, 1).at(0)
    drafts: list[torch.Tensor] = []
    grade = trainer._step.validation.grade

    def watched(*args: Any) -> Any:
        graded = grade(*args)
        drafts.append(torch.as_tensor(graded.draft_M))
        return graded

    trainer._step.validation.grade = watched  # type: ignore[method-assign]
    assert isinstance(trainer.target, TargetModel)
    outcome = trainer._step.evaluate(batch, target_states(trainer.target, batch))
    assert outcome.follows is not None and outcome.chance is not None
    model = AutoModelForCausalLM.from_pretrained(sharp_target)
    with torch.no_grad():
        logits_BNV = model(batch.tokens_BN).logits
    probs_BNV = (logits_BNV / 0.7).softmax(-1)
    at = (outcome.row, outcome.anchor + outcome.depth + 1)
    draft = torch.cat(drafts)
    chances = probs_BNV[at].gather(1, draft.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(outcome.chance, chances, atol=1e-5, rtol=1e-3)
    assert torch.equal(outcome.match, logits_BNV[at].argmax(-1) == draft)
    tokens = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    places = {place.row: place.sequence for place in batch.places}
    for index in range(len(draft)):
        row, position = int(at[0][index]), int(at[1][index])
        token = tokens[places[row]][position + 1]
        assert bool(outcome.follows[index]) == (token == draft[index])
    assert (outcome.follows != outcome.match).any() and outcome.follows.any()


@pytest.mark.slow
def test_one_validation_says_it_all(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    config = make_config(
        target_folder, responses, tmp_path, optimizer={"steps": 20}, run={"validate_every": 20}
    )
    reports: list[TrainingReport] = []
    Trainer(config, reports.append).run()
    report = reports[-1]
    assert report.kind == "validation" and report.is_best and report.num_drafts > 100
    for prefix in ("", "sampled_"):
        lengths = getattr(report, f"{prefix}acceptance_lengths")
        unconditional = getattr(report, f"{prefix}unconditional_acceptance_per_pos")
        conditional = getattr(report, f"{prefix}conditional_acceptance_per_pos")
        assert len(lengths) == len(unconditional) == len(conditional) == 4
        assert lengths[3] == pytest.approx(1 + sum(unconditional))
        assert unconditional[0] == conditional[0]
        assert unconditional[1] == pytest.approx(unconditional[0] * (conditional[1] or 0))
    assert all(r.gradient_norm and r.gradient_norm > 0 for r in reports[:-1])
    assert report.gradient_norm is None
    off = make_config(
        target_folder,
        responses,
        tmp_path / "off",
        optimizer={"steps": 20},
        run={"validate_every": 20, "validation_temperature": 0.0},
    )
    Trainer(off, reports.append).run()
    greedy = reports[-1]
    assert greedy.temperature is None and greedy.sampled_acceptance_lengths == []
    assert greedy.acceptance_lengths == report.acceptance_lengths
