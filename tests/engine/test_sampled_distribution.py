"""Sampled text through the whole engine has exactly the target's distribution.

A target of six tokens, thousands of seeds of one prompt: the joint counts of the first three tokens
are compared with the product of transformers' own conditional probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import make_drafter, make_target_folder

VOCAB = 6
PROMPT = [3, 5, 2, 2]
COUNT = 6_000
K = 2  # the third token is then a bonus token, a corrected one, or drafted again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token is fairly certain, so that the order of tokens shows."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 16}
    folder = make_target_folder(tmp_path_factory.mktemp("small"), seed=3, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def exact(folder: Path, temperature: float, top_k: int) -> Tensor:
    """P(x1, x2, x3 | prompt), [V, V, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    ids = torch.cat((torch.tensor(PROMPT).expand(VOCAB**2, -1), pairs), dim=1)
    logits = model(ids).logits[:, -3:] / temperature
    if top_k:
        smallest = logits.sort(descending=True).values[..., top_k - 1 : top_k]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(-1).view(VOCAB, VOCAB, 3, VOCAB)
    first, second = probs[0, 0, 0], probs[:, 0, 1]
    return first[:, None, None] * second[:, :, None] * probs[:, :, 2]


def sample(llm: LLM, params: dict[str, Any], first_seed: int) -> np.ndarray:
    every = [
        SamplingParams(max_tokens=3, ignore_eos=True, seed=first_seed + i, **params)
        for i in range(COUNT)
    ]
    tokens = [output.token_ids for output in llm.generate([PROMPT] * COUNT, every)]
    return np.array(tokens) @ np.array([VOCAB**2, VOCAB, 1])


def fit(codes: np.ndarray, probs: Tensor) -> float:
    counts = np.bincount(codes, minlength=VOCAB**3)
    expected = probs.flatten().numpy() * COUNT
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return float(stats.chisquare(counts[possible], expected[possible]).pvalue)


def make_llm(folder: Path, head: Path, parallel: bool, draft_sampling: str) -> LLM:
    target = TargetModel.load(folder, dtype=torch.float64)
    sizes: dict[str, Any] = {"num_layers": 1, "draft_vocab_size": 5}
    save_drafter(head, make_drafter(target, parallel=parallel, seed=2, **sizes))
    config = {"model": str(head), "num_speculative_tokens": K, "draft_sampling": draft_sampling}
    return LLM(model=target, speculative_config=config, max_num_seqs=1000, max_model_len=64)


@pytest.mark.parametrize(
    ("parallel", "draft_sampling", "params"),
    [
        (True, "argmax", {"temperature": 1.0}),
        (True, "probabilistic", {"temperature": 1.4}),
        (False, "argmax", {"temperature": 0.8, "top_k": 4}),
        (False, "probabilistic", {"temperature": 1.0}),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(
    folder: Path, tmp_path: Path, parallel: bool, draft_sampling: str, params: dict[str, Any]
) -> None:
    llm = make_llm(folder, tmp_path, parallel, draft_sampling)
    codes = sample(llm, params, first_seed=10**6)
    counted = llm.engine.stats.speculation
    assert 0.1 < counted.num_accepted_tokens / counted.num_draft_tokens < 0.9
    temperature, top_k = params["temperature"], params.get("top_k", 0)
    assert fit(codes, exact(folder, temperature, top_k)) > 1e-3
    # The check is sharp enough to tell the temperature from one a fifth higher.
    assert fit(codes, exact(folder, 1.2 * temperature, top_k)) < 1e-4
