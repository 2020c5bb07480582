"""The command line and environment of vLLM: what stands there, and what may not."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from backends.conftest import HEAD, TARGET
from peagle.backends.vllm.command import (
    MODULE_FOLDER,
    SAFE_ENVIRONMENT,
    VllmCommand,
    speculative_json,
    vllm_command,
)
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.config import SpeculativeConfig
from peagle.errors import CheckpointError, UserError

PEAGLE = SpeculativeConfig(model=HEAD, num_speculative_tokens=4)


def flags(command: VllmCommand) -> dict[str, str]:
    """Values by flag; "" for one without."""
    words = list(command.argv[3:])
    return {
        word: following if not following.startswith("--") else ""
        for word, following in zip(words, [*words[1:], "--"])
        if word.startswith("--")
    }


def test_server_module(gpu):
    command = vllm_command(VllmLaunch(TARGET), gpu)
    assert command.argv[:3] == (str(gpu.python), "-m", "vllm.entrypoints.openai.api_server")
    found = flags(command)
    assert found["--model"] == TARGET and "--speculative-config" not in found
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "8000")
    assert found["--load-format"] == "safetensors"
    assert found["--allowed-origins"] == "[]"
    assert found["--middleware"] == "peagle.serving.vllm_guard.Guard"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "bfloat16"}, {"--dtype": "bfloat16"}),
        ({"max_model_len": 512}, {"--max-model-len": "512"}),
        ({"max_num_seqs": 3}, {"--max-num-seqs": "3"}),
        ({"max_num_batched_tokens": 99}, {"--max-num-batched-tokens": "99"}),
        ({"gpu_memory_utilization": 0.5}, {"--gpu-memory-utilization": "0.5"}),
        ({"kv_cache_gib": 1.5}, {"--kv-cache-memory-bytes": str(3 << 29)}),
        ({"num_kv_blocks": 7}, {"--num-gpu-blocks-override": "7"}),
        ({"block_size": 32}, {"--block-size": "32"}),
        ({"enable_prefix_caching": False}, {"--no-enable-prefix-caching": ""}),
        ({"enable_prefix_caching": True}, {"--enable-prefix-caching": ""}),
        ({"enforce_eager": True}, {"--enforce-eager": ""}),
        ({"seed": 5}, {"--seed": "5"}),
        ({"revision": "abc"}, {"--revision": "abc"}),
        ({"tensor_parallel_size": 4}, {"--tensor-parallel-size": "4"}),
        ({"pipeline_parallel_size": 2}, {"--pipeline-parallel-size": "2"}),
        ({"data_parallel_size": 2}, {"--data-parallel-size": "2"}),
        ({"served_model_name": "m"}, {"--served-model-name": "m"}),
        ({"chat_template": "{{ x }}"}, {"--chat-template": "{{ x }}"}),
        (
            {"tool_call_parser": "hermes"},
            {"--tool-call-parser": "hermes", "--enable-auto-tool-choice": ""},
        ),
        ({"drain_timeout_s": 2.5}, {"--shutdown-timeout": "3"}),
        ({"log_format": "json"}, {"--logging-config": '{"formatter": "json"}'}),
        ({"log_prompts": True}, {"--enable-log-requests": "", "--enable-log-outputs": ""}),
        ({"otlp_endpoint": "http://x:1/"}, {"--otlp-traces-endpoint": "http://x:1/v1/traces"}),
        ({"max_queue": 9}, {"--max-num-queued-reqs": "9"}),
        ({"extra": ("--kv-cache-dtype", "fp8")}, {"--kv-cache-dtype": "fp8"}),
        ({"extra": ("--load-format=dummy",)}, {"--load-format=dummy": ""}),
    ],
)
def test_every_option_has_its_flag_and_is_left_out_by_default(gpu, options, expected):
    plain = flags(vllm_command(VllmLaunch(TARGET), gpu))
    found = flags(vllm_command(VllmLaunch(TARGET, **options), gpu))
    assert expected.items() <= found.items()
    # Nothing else changes.
    differing = {flag for flag in {*plain, *found} if plain.get(flag) != found.get(flag)}
    assert differing - {"--load-format"} == expected.keys()


def test_speculation_of_each_kind():
    def of(config: SpeculativeConfig | None, **options):
        return speculative_json(with_head(VllmLaunch(TARGET, config, **options)))

    assert of(None) is None
    assert of(PEAGLE) == {
        "method": "eagle3",
        "model": HEAD,
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    assert of(SpeculativeConfig(model=str(BUNDLED_EAGLE3))) == {
        "method": "eagle3",
        "model": str(BUNDLED_EAGLE3),
        "num_speculative_tokens": 7,
    }
    lookup = SpeculativeConfig(method="ngram", prompt_lookup_max=5, prompt_lookup_min=2)
    assert of(lookup) == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }
    rich = replace(PEAGLE, max_model_len=300, draft_sampling="probabilistic")
    found = of(rich, speculative_options={"enforce_eager": True})
    assert found is not None
    assert (found["max_model_len"], found["draft_sample_method"]) == (300, "probabilistic")
    assert found["enforce_eager"] is True
    synthetic = replace(PEAGLE, synthetic_acceptance_rates=(0.5, 0.4, 0.3, 0.2))
    found = of(synthetic)
    assert found is not None and found["rejection_sample_method"] == "synthetic"
    assert found["synthetic_acceptance_rates"] == (0.5, 0.4, 0.3, 0.2)
    autoregressive = SpeculativeConfig(
        model=str(BUNDLED_EAGLE3), num_speculative_tokens_per_batch_size=((1, 4, 7), (5, 9, 2))
    )
    found = of(autoregressive)
    assert found is not None
    assert found["num_speculative_tokens_per_batch_size"] == ((1, 4, 7), (5, 9, 2))
    found = of(replace(PEAGLE, num_speculative_tokens_per_batch_size=((3, 9, 2),)))
    assert found is not None, "vLLM refuses schedules that do not begin at one sequence"
    assert found["num_speculative_tokens_per_batch_size"] == ((1, 2, 4), (3, 9, 2))


def test_both_styles_of_a_head_draft_in_parallel(tmp_path):
    from peagle.models.checkpoint import convert_head

    convert_head(BUNDLED_PEAGLE, tmp_path / "head", format="speculators")
    launch = with_head(VllmLaunch(TARGET, SpeculativeConfig(model=str(tmp_path / "head"))))
    found = speculative_json(launch)
    assert found is not None
    assert (found["method"], found["parallel_drafting"]) == ("eagle3", True)


def test_kinds_that_contradict_the_head_are_refused(tmp_path, gpu):
    for model, asked in ((str(BUNDLED_EAGLE3), True), (HEAD, False)):
        config = SpeculativeConfig(model=model, parallel_drafting=asked)
        with pytest.raises(UserError, match=f"parallel_drafting is {asked}"):
            vllm_command(VllmLaunch(TARGET, config), gpu)
    weights = load_file(f"{HEAD}/model.safetensors")
    del weights["mask_hidden"]
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(f"{HEAD}/config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no tensor mask_hidden"):
        vllm_command(VllmLaunch(TARGET, SpeculativeConfig(model=str(tmp_path))), gpu)


def test_environment(gpu, cpu, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "of-somebody-else")
    found = vllm_command(VllmLaunch(TARGET, PEAGLE), gpu).variables()
    assert SAFE_ENVIRONMENT.items() <= found.items()
    assert found["PYTHONPATH"] == f"{MODULE_FOLDER}:/mine"
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0" and found["VLLM_API_KEY"] == ""
    assert not any(name.startswith("VLLM_CPU") for name in found)
    plain = vllm_command(VllmLaunch(TARGET), gpu).environment
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "PEAGLE_VLLM"} & plain.keys()
    assert found["PEAGLE_VLLM"] == "1", "vLLM corrects drafts"
    without = vllm_command(VllmLaunch(TARGET, replace(PEAGLE, correction=False)), gpu)
    assert without.environment["PEAGLE_VLLM"] == "0"
    on_cpu = vllm_command(VllmLaunch(TARGET, PEAGLE, kv_cache_gib=0.5, threads=2), cpu)
    expected = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert (expected | {"OMP_NUM_THREADS": "2"}).items() <= on_cpu.environment.items()
    found = flags(on_cpu)
    assert found["--dtype"] == "float32" and "--enforce-eager" in found
    assert json.loads(found["--override-generation-config"]) == {"temperature": 0.0}


def test_nothing_else_lies_where_vllm_imports_from():
    """A module called server or command there would shadow one of vLLM's environment."""
    names = {path.stem for path in MODULE_FOLDER.glob("*.py")}
    assert names == {"peagle"}


characters = st.characters(min_codepoint=33, max_codepoint=126)
keys = st.text(characters, min_size=16, max_size=40).map("SECRET{}".format)


@settings(deadline=None, max_examples=50)
@given(st.lists(keys, min_size=1, max_size=3, unique=True))
def test_vllm_gets_digests_of_keys_alone(given_keys):
    installation = VllmInstallation(MODULE_FOLDER / "python", "0.32.0")
    launch = VllmLaunch("m", host="0.0.0.0", keys=tuple(given_keys), port=1)
    command = vllm_command(launch, installation)
    for key in given_keys:
        assert not any(key in word for word in command.argv)
        assert key not in str(command) and key not in repr(command) and key not in repr(launch)
        assert not any(key in value for value in command.environment.values())
    assert command.environment["VLLM_API_KEY"] == ""
    digests = json.loads(command.environment["PEAGLE_VLLM_GUARD"])["keys"]
    assert len(digests) == len(given_keys)
    assert not any(digest in str(command) for digest in digests)


def test_what_is_printed_is_what_a_shell_reads(gpu):
    launch = VllmLaunch(TARGET, PEAGLE, chat_template="{{ 'a b' }} $HOME", allowed_origins=("*",))
    command = vllm_command(launch, gpu)
    words = [word for word in shlex.split(str(command)) if word != "\n"]  # a shell joins lines
    assert words[0] == "env"
    assert words[len(command.environment) + 1 :] == list(command.argv)
    told = dict(word.split("=", 1) for word in words[1 : len(command.environment) + 1])
    assert told == command.environment


def test_no_key_no_other_machine():
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(UserError, match="there is no API key"):
            VllmLaunch("m", host=host, keys=())
        VllmLaunch("m", host=host, keys=("k" * 20,))
    for host in ("127.0.0.1", "localhost", "::1"):
        VllmLaunch("m", host=host, keys=())


def test_hub_ids_and_revisions(gpu):
    """A hub id goes to vLLM as it is, its revision apart."""
    found = flags(vllm_command(VllmLaunch("owner/name@v1"), gpu))
    assert (found["--model"], found["--revision"]) == ("owner/name", "v1")
    assert vllm_command(VllmLaunch(TARGET), gpu).argv.count("--revision") == 0
