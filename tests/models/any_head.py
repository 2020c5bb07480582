"""Hypothesis strategies: any head that can be written down, and what may be known about it."""

from hypothesis import strategies as st

from peagle.models.drafter import DrafterConfig
from peagle.models.fingerprint import TargetFingerprint

FINGERPRINT = TargetFingerprint("tiny", 320, 32, 4, None, "0" * 64).to_json()

ROPES = st.one_of(
    st.floats(100, 1e7).map(lambda theta: {"rope_type": "default", "rope_theta": theta}),
    st.floats(1, 64).map(lambda f: {"rope_type": "linear", "rope_theta": 1e4, "factor": f}),
    st.just(
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    ),
    st.just({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
)


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    """Any head that can be written down."""
    kv_heads, vocab = draw(st.integers(1, 3)), draw(st.integers(8, 60))
    pre_fc = draw(st.sampled_from(["", "norm_before_fc", "fc_norm"]))
    num_layers, window = draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 99))
    windows = draw(st.tuples(*[st.sampled_from((None, window))] * num_layers))
    return DrafterConfig(
        hidden_size=draw(st.integers(2, 24)),
        intermediate_size=draw(st.integers(1, 24)),
        num_layers=num_layers,
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        vocab_size=vocab,
        draft_vocab_size=draw(st.sampled_from([vocab, vocab // 2, 1])),
        target_hidden_size=draw(st.integers(2, 24)),
        aux_layer_ids=tuple(sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))),
        mask_token_id=draw(st.none() | st.integers(0, vocab - 1)),
        norm_before_residual=draw(st.booleans()),
        norm_before_fc=pre_fc == "norm_before_fc",
        fc_norm=pre_fc == "fc_norm",
        attention_bias=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6, 0.01])),
        max_position_embeddings=draw(st.integers(1, 4096)),
        rope_parameters=draw(ROPES),
        trained_depth=draw(st.none() | st.integers(1, 16)),
        qk_norm=draw(st.booleans()),
        norm_output=draw(st.booleans()),
        windows=windows,
    )


VERIFIERS = st.fixed_dictionaries(
    {
        "name_or_path": st.text(min_size=1, max_size=9),
        "architectures": st.lists(st.sampled_from(["LlamaForCausalLM", "Qwen3ForCausalLM"])),
    }
)
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "target": st.just(FINGERPRINT),
        "verifier": VERIFIERS,
        "note": st.integers() | st.lists(st.text(max_size=3)),
    },
)
