"""Heads as other people lay them out: they load, draft, convert, and compute what they should.

The heads and how they were made: tests/fixtures/heads/README.md.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.models.checkpoint import convert_head, load_drafter, read_head
from peagle.models.drafter import Drafter
from peagle.models.elements import may_attend
from peagle.models.target import TargetModel
from tests.conftest import make_target_folder
from tests.models.editing import bits_of_head
from tests.models.published_heads import FOREIGN_HEADS, head_folder

NAMES = sorted(path.parent.name for path in FOREIGN_HEADS.glob("*/config.json"))
PARALLEL = [name for name in NAMES if "_peagle" in name]
BY_PACKAGE = [name for name in NAMES if name.startswith("speculators")]
K = 3
PROMPTS = [[5, 9, 2, 40], [7] * 9, list(range(3, 33))]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of the size that the fixtures were made for."""
    folder = tmp_path_factory.mktemp("small")
    return make_target_folder(folder, vocab_size=64, hidden_size=16)


@pytest.fixture
def small(small_folder: Path) -> TargetModel:
    return TargetModel.load(small_folder, dtype=torch.float32)


def test_there_are_heads_of_every_kind() -> None:
    assert NAMES == [
        "published_peagle",
        "published_peagle_sharded",
        "speculators_eagle3",
        "speculators_eagle3_qwen3",
        "speculators_peagle",
        "speculators_peagle_qwen3",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_read_as_what_they_are(name: str) -> None:
    head = read_head(head_folder(name))
    config, facts = head.config, head.facts
    assert config.is_parallel == (name in PARALLEL)
    assert config.mask_token_id == (63 if name in PARALLEL else None)
    assert config.qk_norm == name.endswith("qwen3")
    assert config.aux_layer_ids == (1, 2, 3)
    assert config.norm_before_residual == (name in ("published_peagle", "speculators_eagle3"))
    assert config.norm_output == config.norm_before_fc == (name == "speculators_eagle3_qwen3")
    assert config.fc_norm == (name == "speculators_peagle_qwen3")
    assert config.is_pruned == (
        name not in ("published_peagle_sharded", "speculators_peagle_qwen3")
    )
    if name in BY_PACKAGE:
        assert config.trained_depth == 3
        assert facts["verifier"] == {
            "name_or_path": "example/tiny",
            "architectures": ["LlamaForCausalLM"],
        }
    else:
        assert config.trained_depth is None
        assert facts == {}


def test_older_rope_keys_are_read() -> None:
    plain = read_head(head_folder("published_peagle")).config.rope_parameters
    assert plain == {"rope_type": "default", "rope_theta": 150000.0}
    llama3 = read_head(head_folder("published_peagle_sharded")).config.rope_parameters
    assert (llama3["rope_type"], llama3["rope_theta"]) == ("llama3", 500000.0)


# ---- the same numbers as the package's ----


def masked(mask_QK: Tensor) -> Any:
    """Attention of [E, H, d] tensors through a mask; earlier calls' keys come first."""
    seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = seen.setdefault(layer, ([], []))
        keys.append(key)
        values.append(value)
        heads = (x.transpose(0, 1) for x in (query, torch.cat(keys), torch.cat(values)))
        end = sum(map(len, keys))
        mask = mask_QK[end - len(query) : end, :end]
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1)

    return attend


def rule(anchors: Tensor, depths: Tensor) -> Tensor:
    """Who may attend to whom, [E, E]."""
    document = torch.zeros_like(anchors)
    own = (anchors[:, None], depths[:, None], document[:, None])
    return may_attend(*own, anchors[None], depths[None], document[None])


def parallel_logits(drafter: Drafter, data: dict[str, Tensor]) -> Tensor:
    anchors, depths = data["anchors"], data["depths"]
    is_real = depths == 0
    mask_token = drafter.config.mask_token_id
    assert mask_token is not None
    tokens = torch.where(is_real, data["tokens"][anchors], mask_token)
    features = drafter.combine_features(data["features"])[anchors]
    hidden = torch.where(is_real[:, None], features, drafter.shared_hidden())
    hidden = drafter(tokens, hidden, anchors + depths, masked(rule(anchors, depths)))
    return drafter.compute_logits(hidden)[None]


def chained_logits(drafter: Drafter, data: dict[str, Tensor]) -> Tensor:
    length, passes = len(data["tokens"]), len(data["logits"])
    anchors = torch.arange(length)
    depths = torch.arange(passes).repeat_interleave(length)
    attend = masked(rule(anchors.repeat(passes), depths))
    hidden, logits = drafter.combine_features(data["features"]), []
    for depth in range(passes):
        # The package's training reads the tokens one further at each pass, zeros past the end.
        tokens = F.pad(data["tokens"][depth:], (0, depth))
        hidden = drafter(tokens, hidden, anchors + depth, attend)
        logits.append(drafter.compute_logits(hidden))
    return torch.stack(logits)


@torch.no_grad()
@pytest.mark.parametrize("name", BY_PACKAGE)
def test_logits_are_those_of_the_package(small: TargetModel, name: str) -> None:
    data = load_file(FOREIGN_HEADS / "expected" / f"{name}.safetensors")
    drafter = load_drafter(head_folder(name), small)
    compute = parallel_logits if name in PARALLEL else chained_logits
    found = compute(drafter, data)
    assert data["logits"].std() > 0.5
    torch.testing.assert_close(found, data["logits"], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_package_reads_what_is_written(small: TargetModel, name: str, tmp_path: Path) -> None:
    """Where the package is installed: it does not support every transformers that peagle does."""
    model_class = pytest.importorskip("speculators").SpeculatorModel
    convert_head(head_folder(name), tmp_path / "v", "vllm")
    convert_head(tmp_path / "v", tmp_path / "s", "speculators", target=small.name)
    drafter = load_drafter(tmp_path / "s", small)
    if drafter.config.hidden_size != small.hidden_size:
        with pytest.raises(Exception, match=r"size mismatch|mismatched"):
            model_class.from_pretrained(tmp_path / "s")
        return
    model: Any = model_class.from_pretrained(tmp_path / "s").float()
    assert model.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]
    stored = load_file(tmp_path / "s" / "model.safetensors")
    loaded = model.state_dict()
    assert set(stored) <= set(loaded)
    for tensor_name, value in stored.items():
        assert torch.equal(loaded[tensor_name], value.to(loaded[tensor_name].dtype)), tensor_name

    # One layer stack at depth 0: plain causal attention.
    torch.manual_seed(0)
    length = 9
    tokens = torch.randint(0, 63, (length,))
    features = torch.randn(length, 48)
    logits: list[torch.Tensor] = []
    if "embed_tokens.weight" not in stored:
        model.embed_tokens.weight.copy_(small.embedding_weight())
    model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    documents = torch.zeros(1, length, dtype=torch.long)
    parent = type(model).__mro__[1 if drafter.config.is_parallel else 0]
    parent.forward(model, features[None], tokens[None], documents, ttt_steps=1)

    attend = masked(torch.ones(length, length, dtype=torch.bool).tril())
    hidden = drafter(tokens, drafter.combine_features(features), torch.arange(length), attend)
    torch.testing.assert_close(drafter.compute_logits(hidden), logits[0], atol=1e-5, rtol=0)


# ---- they draft ----


def generate(target: Path, head: Path) -> list[tuple[list[int], int, list[int]]]:
    """Tokens, number of drafts and accepted tokens per position of three prompts, greedily."""
    llm = LLM(
        target,
        speculative_config={"model": str(head), "num_speculative_tokens": K},
        dtype="float64",
    )
    return [
        (output.token_ids, output.stats.num_drafts, output.stats.num_accepted_tokens_per_pos)
        for output in llm.generate(PROMPTS, PARAMS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_they_draft_losslessly_and_alike_in_both_styles(
    small_folder: Path, tmp_path: Path, name: str
) -> None:
    expected = generate(small_folder, head_folder(name))
    plain = LLM(small_folder, dtype="float64").generate(PROMPTS, PARAMS)
    assert all(num_drafts > 0 for _, num_drafts, _ in expected)
    assert [tokens for tokens, _, _ in expected] == [o.token_ids for o in plain]
    for format in ("vllm", "speculators"):
        convert_head(head_folder(name), tmp_path / format, format)
        assert generate(small_folder, tmp_path / format) == expected


@pytest.mark.parametrize("name", NAMES)
def test_conversion_keeps_every_bit(tmp_path: Path, name: str) -> None:
    convert_head(head_folder(name), tmp_path / "v", "vllm")
    convert_head(tmp_path / "v", tmp_path / "s", "speculators")
    convert_head(tmp_path / "s", tmp_path / "v2", "vllm")
    expected = bits_of_head(head_folder(name))
    for folder in ("v", "s", "v2"):
        assert bits_of_head(tmp_path / folder) == expected
        assert read_head(tmp_path / folder).config == read_head(head_folder(name)).config
    first, second = (tmp_path / f / "config.json" for f in ("v", "v2"))
    assert first.read_text() == second.read_text()
