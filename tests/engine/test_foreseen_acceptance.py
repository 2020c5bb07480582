"""Acceptance of the bundled head in the engine against what its logits over whole outputs foresee.

The reference knows no KV cache, no batches and no steps: transformers' hidden states of prompt and
output, and for every draft one pass of the head over all tokens so far. It walks as serving does:
the next draft starts behind the accepted tokens.
"""

from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import CandidateTrees, EngineConfig
from peagle.engine.placement import load_target
from peagle.evaluation.prompts import load_prompt_set
from peagle.kernels.trees.growth import best_first_trees
from peagle.models.checkpoint import load_correction, load_drafter
from peagle.models.drafter import Drafter
from peagle.speculation.proposers import TREE_TEMPERATURE

K = 7


def attend(_: int, query_THd: Tensor, key_THd: Tensor, value_THd: Tensor) -> Tensor:
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query_THd, key_THd, value_THd))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def slots(head: Drafter, tokens: list[int], features_TA: Tensor) -> Tensor:
    """Hidden states [K, D] of the slots that draft behind tokens that have features."""
    count = len(tokens) - 1
    mask = head.config.mask_token_id
    assert mask is not None
    ids = torch.tensor([*tokens[1:], *[mask] * (K - 1)])
    shared_KD = head.shared_hidden().expand(K - 1, -1)
    hidden_SD = torch.cat((head.combine_features(features_TA[:count]), shared_KD))
    return head(ids, hidden_SD, torch.arange(len(ids)), attend)[count - 1 :]


def tree(head: Drafter, hidden_KD: Tensor, shape: CandidateTrees) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree over the slots."""
    logits_1KV = head.compute_logits(hidden_KD).unsqueeze(0)
    children = None
    if head.correction is not None:
        states = head.correction.start(head.normed(hidden_KD).unsqueeze(0))
        ids = head.target_ids()
        children = head.correction.tree_children(logits_1KV, states, ids, TREE_TEMPERATURE)
    tokens, parents, _ = best_first_trees(
        logits_1KV,
        torch.tensor([K]),
        num_parallel_trees=shape.num_parallel_trees,
        max_nodes=shape.max_nodes,
        temperature=TREE_TEMPERATURE,
        children=children,
    )
    return head.to_target_ids(tokens)[0].tolist(), parents[0].tolist()


def foreseen(
    model: Any, head: Drafter, prompt: list[int], output: list[int], shape: CandidateTrees
) -> list[int]:
    """Accepted drafts of every step that serving makes of an output."""
    tokens = [*prompt, *output]
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features_TA = torch.cat([states[i][0] for i in head.config.aux_layer_ids], -1)
        accepted, at = list[int](), len(prompt) + 1
        while at < len(tokens):
            nodes, parents = tree(head, slots(head, tokens[:at], features_TA), shape)
            row, passed = 0, 0
            pairs = list(zip(parents, nodes, strict=True))
            while at + passed < len(tokens) and (row, tokens[at + passed]) in pairs:
                row = pairs.index((row, tokens[at + passed])) + 1
                passed += 1
            accepted.append(passed)
            at += passed + 1
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [7, 16])
def test_served_acceptance_is_the_foreseen_one(
    nodes: int, limit: int = 4, max_tokens: int = 40
) -> None:
    """Within 1%: rounding may choose another of two paths that are nearly as probable."""
    shape = CandidateTrees(min(nodes, 16), K, nodes)
    prompts = [one.text for one in load_prompt_set("humaneval", limit)]
    llm = LLM(
        str(BUNDLED_TARGET),
        speculative_config={
            "model": str(BUNDLED_PEAGLE),
            "parallel_drafting_spec": {
                "num_parallel_trees": shape.num_parallel_trees,
                "prediction_depth": K,
                "max_nodes": nodes,
            },
            "prompt_lookup": False,
        },
        device="cpu",
        enable_prefix_caching=False,
    )
    served: list[list[int]] = [[] for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for chunk in llm.stream(prompts, params):
        served[chunk.index] += [chunk.num_accepted] if chunk.num_drafted else []
        outputs[chunk.index] += chunk.token_ids

    target = load_target(str(BUNDLED_TARGET), EngineConfig(device="cpu"))
    head = load_drafter(str(BUNDLED_PEAGLE), target)
    head.correction = load_correction(str(BUNDLED_PEAGLE), head)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET).float()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    expected = [
        foreseen(model, head, tokenizer(text)["input_ids"], output, shape)
        for text, output in zip(prompts, outputs, strict=True)
    ]
    # The end of an output cuts its last step.
    lengths = [1 + fmean(n for steps in of for n in steps[:-1]) for of in (served, expected)]

    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)
