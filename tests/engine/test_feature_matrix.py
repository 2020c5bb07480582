"""Every sampling feature, greedy and sampled, plain, with chains and with trees of a head: exact.

Each cell runs the whole engine in float64 against plain decoding by the transformers model and
textbook formulas, and shows that it would notice if the feature were ignored.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.engine.outputs import RequestOutput
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.corrections import add_correction
from tests.engine.feature_reference import (
    JSON,
    REGEX,
    VOCAB,
    Output,
    Reference,
    ended,
    fit,
    make_folder,
    shown,
    steer,
)

PROMPT_LEN = 7
_dice = random.Random(1)
PROMPTS = [tuple(_dice.choices(range(VOCAB), k=PROMPT_LEN)) for _ in range(24)]
PROMPT = (1, 1, 3, 1, 3, 3, 3)  # likely to repeat a token that is not in it
FILLER = PROMPTS[-1] + PROMPTS[0][:5]
SHARE_RIGHT = 0.8
COUNT = 480

# What a request asks for, and what the same request is like to an engine that ignores it.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"temperature": 1.5}),
    "min_p": ({"min_p": 0.3}, {}),
    "typical_p": ({"typical_p": 0.5}, {}),
    "top_k": ({"top_k": 3}, {}),
    "top_p": ({"top_p": 0.7}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.7}, {}),
    "presence_penalty": ({"presence_penalty": 1.5}, {}),
    "frequency_penalty": ({"frequency_penalty": 0.9}, {}),
    "logit_bias": ({"logit_bias": {1: 1.5, 2: -math.inf}}, {}),
    "bad_words": ({"bad_words": ("12", "22", (4, 6), (2, 2), (4, 3, 2), (5, 1))}, {}),
    "allowed_token_ids": ({"allowed_token_ids": (1, 4, 5, 6)}, {}),
    "min_tokens": (
        {"min_tokens": 2, "stop_token_ids": (4, 5), "ignore_eos": False},
        {"stop_token_ids": (4, 5), "ignore_eos": False},
    ),
    "stop": ({"stop": (",1", "12", "]]", "22,")}, {}),
    "stop_token_ids": ({"stop_token_ids": (3, 6)}, {}),
    "ignore_eos": ({"ignore_eos": True}, {"ignore_eos": False}),
    "several eos ids": ({"ignore_eos": False}, {"stop_token_ids": (0,)}),
    "regex": ({"structured_output": REGEX, "ignore_eos": False}, {"ignore_eos": False}),
    "json_schema": ({"structured_output": JSON, "ignore_eos": False}, {"ignore_eos": False}),
    "together": (
        {
            "logit_bias": {1: 1.0},
            "bad_words": ("22",),
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.4,
            "min_p": 0.02,
            "top_p": 0.95,
            "stop": ("1[",),
        },
        {},
    ),
}
CHAINS = ("plain", "eagle3", "peagle")
WAYS = (*CHAINS, "trees", "eagle3 trees")
# A corrected head chooses column by column, as one does for a grammar.
GREEDY = [
    *itertools.product(FEATURES, ("plain", "trees")),
    *zip(FEATURES, itertools.cycle(("eagle3", "peagle", "eagle3 trees")), strict=False),
    *itertools.product(("together", "regex"), ("corrected", "corrected trees")),
    *itertools.product(("together", "json_schema"), ("eagle3 trees",)),
]
# Drafts are drawn, by one kind of head or the other.
SAMPLED = [
    *((feature, "plain") for feature in FEATURES),
    *zip(FEATURES, itertools.cycle(("eagle3", "peagle")), strict=False),
    *itertools.product(("together", "regex"), ("corrected",)),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prompts in chunks": {"max_num_batched_tokens": 3},
    "few blocks": {"num_kv_blocks": 9},
}


def make_params(asked: Mapping[str, Any], **shape: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, **shape, **asked})


@dataclass(frozen=True)
class World:
    """The target, its reference, and its heads by the way to draft."""

    target: TargetModel
    reference: Reference
    heads: dict[str, Path]

    def make_llm(
        self,
        way: str,
        k: int,
        asked: Mapping[Output, SamplingParams],
        draft_sampling: str = "argmax",
        **options: Any,
    ) -> LLM:
        """An engine whose drafts are often right for prompts with these parameters."""
        config: dict[str, Any] | None = None
        if way != "plain":
            config = {"model": str(self.heads[way]), "draft_sampling": draft_sampling}
            if way.endswith("trees"):
                shape = {"num_parallel_trees": 3, "prediction_depth": k, "max_nodes": 2 * k + 1}
                config |= {"parallel_drafting_spec": shape, "prompt_lookup": False}
            else:
                config["num_speculative_tokens"] = k
        options = {"max_model_len": 64, "block_size": 4, **options}
        if way == "eagle3 trees" and "num_kv_blocks" in options:
            options["num_kv_blocks"] += 2  # nodes of beams take blocks
        llm = LLM(model=self.target, speculative_config=config, **options)

        def choose(context: Output) -> int | None:
            prompt, output = context[:PROMPT_LEN], context[PROMPT_LEN:]
            params = asked[prompt]
            if ended(params, output):
                return None
            return self.reference.likeliest(params, prompt, output)

        if way != "plain":
            steer(llm, choose, SHARE_RIGHT)
        return llm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = make_folder(tmp_path_factory.mktemp("target"))
    target = TargetModel.load(folder, dtype=torch.float64)
    heads = {way: tmp_path_factory.mktemp(way) for way in ("eagle3", "peagle", "corrected")}
    sizes: dict[str, Any] = {"num_layers": 1, "draft_vocab_size": 7}
    for seed, (way, head) in enumerate(heads.items(), start=4):
        save_drafter(head, make_drafter(target, parallel=way != "eagle3", seed=seed, **sizes))
    add_correction(heads["corrected"])
    heads |= {"trees": heads["peagle"], "corrected trees": heads["corrected"]}
    heads["eagle3 trees"] = heads["eagle3"]
    return World(target, Reference(folder), heads)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "way"), GREEDY)
def test_greedy_output_is_the_references(world: World, feature: str, way: str) -> None:
    k, shape = 3, {"max_tokens": 16, "temperature": 0.0}
    asked, ignored = (make_params({**f, **shape}) for f in FEATURES[feature])
    if asked.min_tokens:
        asked = replace(asked, min_tokens=10)
    # Outputs that stop early show little of the deepest drafts.
    prompts = PROMPTS if asked.stop_token_ids else PROMPTS[:12]
    wanted = [world.reference.greedy(asked, prompt) for prompt in prompts]
    llm = world.make_llm(way, k, dict.fromkeys(prompts, asked))
    accepted: Counter[int] = Counter()
    rejected: Counter[int] = Counter()
    outputs: dict[int, RequestOutput] = {}
    for chunk in llm.stream(prompts, asked):
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output
        else:  # a last chunk may be cut
            accepted.update(range(chunk.num_accepted))
            rejected.update([chunk.num_accepted] * (chunk.num_accepted < chunk.num_drafted))
    for index, output in enumerate(wanted):
        assert tuple(outputs[index].token_ids) == output
        assert outputs[index].text == shown(asked, output)
        assert outputs[index].finish_reason == ended(asked, output)
    if way != "plain":
        assert set(accepted) == set(range(k))
        assert set(range(way.endswith("trees"), k)) <= set(
            rejected
        )  # a tree may hold all that may come
    # Greedy decoding takes the likeliest token, which filters keep.
    of_sampling = feature in ("plain", "min_p", "typical_p", "top_k", "top_p")
    plain = [world.reference.greedy(ignored, prompt) for prompt in prompts]
    assert (plain == wanted) == of_sampling


def sample(world: World, way: str, params: SamplingParams, name: str) -> list[list[Output]]:
    """Outputs of one prompt with COUNT seeds, `params.n` of each; drafts are often accepted."""
    llm = world.make_llm(way, 2, {PROMPT: params}, "probabilistic", max_num_seqs=500)
    first_seed = zlib.crc32(f"{way} {name}".encode()) << 16
    every = [replace(params, seed=first_seed + i) for i in range(COUNT // params.n)]
    found = [
        [tuple(output.token_ids) for output in request.outputs]
        for request in llm.generate([PROMPT] * len(every), every)
    ]
    if way != "plain":
        assert 1.25 < llm.stats.speculation.acceptance_length < 2.75
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "way"), SAMPLED)
def test_sampled_outputs_have_the_references_distribution(
    world: World, feature: str, way: str
) -> None:
    shape = {"max_tokens": 3, "temperature": 0.8}
    asked, ignored = (make_params(f, **shape) for f in FEATURES[feature])
    outputs = [output for (output,) in sample(world, way, asked, feature)]
    assert fit(outputs, world.reference.joint(asked, PROMPT)) > 1e-3
    assert fit(outputs, world.reference.joint(ignored, PROMPT)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("way", CHAINS)
def test_n_outputs_are_independent_samples(world: World, way: str) -> None:
    params = make_params({"n": 3}, max_tokens=3, temperature=0.8)
    found = sample(world, way, params, "n")
    joint = world.reference.joint(params, PROMPT)
    assert fit(itertools.chain(*found), joint) > 1e-3
    last = [sum(p for o, p in joint.items() if o[2] == token) for token in range(VOCAB)]
    triples = [tuple(output[2] for output in outputs) for outputs in found]
    every = [*itertools.product(range(VOCAB), repeat=3)]
    assert fit(triples, {t: math.prod(last[token] for token in t) for t in every}) > 1e-3
    assert fit(triples, {(t, t, t): last[t] for t in range(VOCAB)}) < 1e-4  # one seed for all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "way", "temperature"),
    [
        (schedule, way, float((i + j) % 2))
        for i, schedule in enumerate(SCHEDULES)
        for j, way in enumerate(WAYS)
        if (i + j) % 3 != 2  # each way meets two of them
    ],
)
def test_logprobs_are_those_of_the_raw_logits(
    world: World, schedule: str, way: str, temperature: float
) -> None:
    shape = {"max_tokens": 12, "temperature": temperature, "repetition_penalty": 1.5}
    counts = [(0, 3), (VOCAB, None), (3, 0), (None, VOCAB), (None, None), (2, 2)]
    every = [
        make_params({"logprobs": of_output, "prompt_logprobs": of_prompt}, seed=i, **shape)
        for i, (of_output, of_prompt) in enumerate(counts)
    ]
    prompts = PROMPTS[: len(every)]
    asked = dict(zip(prompts, every, strict=True))
    llm = world.make_llm(way, 3, asked, **SCHEDULES[schedule])
    first = llm.generate(prompts, every)
    again = llm.generate(prompts, every)  # with the prompts' KV at hand
    without = [replace(params, logprobs=None, prompt_logprobs=None) for params in every]
    unasked = llm.generate(prompts, without)
    for output, params, bare in zip(first + again, every * 2, unasked * 2, strict=True):
        assert same(output, bare)
        prompt, tokens = tuple(output.prompt_token_ids), tuple(output.token_ids)
        if params.is_greedy:
            assert tokens == world.reference.greedy(params, prompt)
        text, size = prompt + tokens, len(prompt)
        check_logprobs(world, text, range(size, len(text)), output.logprobs, params.logprobs)
        of_prompt = output.prompt_logprobs and output.prompt_logprobs[1:]
        check_logprobs(world, text, range(1, size), of_prompt, params.prompt_logprobs)
    assert bool(llm.stats.num_preemptions) == (schedule == "few blocks")
    cached = sum(output.num_cached_tokens for output in again)
    assert cached or schedule == "few blocks"  # others need the blocks there
    assert way == "plain" or llm.stats.speculation.acceptance_length > 1.1


def check_logprobs(
    world: World,
    text: Output,
    at: range,
    given: Sequence[TokenLogprobs | None] | None,
    num_top: int | None,
) -> None:
    if num_top is None:
        assert given is None
        return
    assert given is not None and len(given) == len(at)
    for index, one in zip(at, given, strict=True):
        wanted = world.reference.logprobs(text[:index], text[index], num_top)
        assert one is not None and (one.token_id, one.rank) == (wanted.token_id, wanted.rank)
        assert [token for token, _ in one.top] == [token for token, _ in wanted.top]
        values = [one.logprob, *(value for _, value in one.top)]
        assert values == pytest.approx([wanted.logprob, *(v for _, v in wanted.top)], abs=1e-9)


@dataclass(frozen=True)
class Seeded:
    """Seeded requests, and what each gives alone without drafts, by prompt."""

    asked: dict[Output, SamplingParams]
    alone: dict[Output, RequestOutput]


@pytest.fixture(scope="module")
def seeded(world: World) -> Seeded:
    """One request for each feature."""
    features = {name: asked for name, (asked, _) in FEATURES.items()}
    features |= {"logprobs": {"logprobs": 2}, "prompt_logprobs": {"prompt_logprobs": 2}}
    asked: dict[Output, SamplingParams] = {FILLER[:PROMPT_LEN]: make_params({}, max_tokens=16)}
    plain = world.make_llm("plain", 0, asked)
    alone: dict[Output, RequestOutput] = {}
    for prompt, feature in zip(PROMPTS, features.values(), strict=False):
        for seed in itertools.count():
            asked[prompt] = make_params(feature, seed=seed, max_tokens=16, temperature=0.8)
            (alone[prompt],) = plain.generate(prompt, asked[prompt])
            if len(alone[prompt].token_ids) >= 6:  # long enough to be preempted
                break
    return Seeded(asked, alone)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_seeded_request_gives_the_output_of_plain_decoding(
    world: World, seeded: Seeded, way: str
) -> None:
    """Alone or beside others, with any K, preempted or not.

    For drafts by argmax, trees among them, it says more than the distributions above.
    """
    asked, alone = seeded.asked, seeded.alone
    for first_k in range(1 if way == "plain" else 2):
        every = [asked[prompt] for prompt in alone]
        if way != "plain":
            every = [
                replace(params, num_speculative_tokens=1 + (first_k + i) % 3)
                for i, params in enumerate(every)
            ]
        llm = world.make_llm(way, 3, asked, max_num_seqs=len(alone))
        for one, other in zip(alone.values(), llm.generate([*alone], every), strict=True):
            assert same(one, other)
        if way != "plain":
            drafted = llm.stats.speculation
            least = 0.05 if way.endswith("trees") else 0.2
            assert least < drafted.num_accepted_tokens / drafted.num_draft_tokens < 0.8
    small = world.make_llm(way, 3, asked, num_kv_blocks=8 if way == "plain" else 10)
    for prompt, one in [*alone.items()][WAYS.index(way) % 2 :: 2]:
        _, other = small.generate([FILLER, prompt], [asked[FILLER[:PROMPT_LEN]], asked[prompt]])
        assert other.num_preemptions and same(one, other)


def same(one: RequestOutput, other: RequestOutput) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("token_ids", "text", "finish_reason")
    )
