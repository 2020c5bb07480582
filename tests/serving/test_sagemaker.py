"""The container's environment as arguments: vLLM's mapping, then vLLM's options as ours."""

import json
import string
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.serving.sagemaker import PREFIX, RULES, arguments_from, vllm_flags

NOWHERE = Path("/nonexistent/model")
HEAD = (
    '{"method": "eagle3", "model": "/opt/ml/additional-model-data-sources/drafter/", '
    '"num_speculative_tokens": 7, "parallel_drafting": true}'
)
HOST, PORT = ["--host", "0.0.0.0"], ["--port", "8080"]
DRAIN, MINUTELY = ["--drain-timeout", "25"], ["--cloudwatch-interval", "60"]
PLATFORM = [*HOST, *PORT, *DRAIN, *MINUTELY]


def vllm(**variables: str) -> list[str]:
    """What vLLM's command line would be."""
    flags = vllm_flags({PREFIX + name: value for name, value in variables.items()})
    return [token for flag in flags for token in flag.arguments]


def ours(variables: dict[str, str], model_dir: Path = NOWHERE) -> list[str]:
    """Our arguments for variables given without their prefix, beside a model."""
    environ = {"HF_MODEL_ID": "owner/name", **{PREFIX + k: v for k, v in variables.items()}}
    model, *rest = arguments_from(environ, model_dir=model_dir)
    assert model == "owner/name"
    return rest


# ---- vLLM's mapping ----


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("4096", ["4096"]),
        ("two words", ["two words"]),
        ("true", []),
        ("", []),
        ("false", None),
        ("True", ["True"]),
        ("False", ["False"]),
        (HEAD, [HEAD]),
        ("{}", ["{}"]),
        (' {"a": [1, 2]}', [' {"a": [1, 2]}']),
        ('["a", "b c"]', ["a", "b c"]),
        ('["one"]', ["one"]),
        ('[1, 2.5, true, null, {"a": 1}]', ["1", "2.5", "true", "null", '{"a": 1}']),
        (' ["a"] ', ["a"]),
        ("[]", []),
        ('["a"', ['["a"']),
        ('{"a": ', ['{"a": ']),
        ("[" * 100_000, ["[" * 100_000]),
        ("[" + "9" * 5000 + "]", ["[" + "9" * 5000 + "]"]),
        ('"quoted"', ['"quoted"']),
        ("null", ["null"]),
        ("--port", ["--port"]),
    ],
)
def test_value_becomes_tokens(value, tokens):
    assert vllm(X_Y=value) == ([] if tokens is None else ["--x-y", *tokens])


@pytest.mark.parametrize(
    ("variable", "name"),
    [("MAX_MODEL_LEN", "--max-model-len"), ("max_Model_len", "--max-model-len"), ("X", "--x")],
)
def test_name_becomes_option(variable, name):
    assert vllm(**{variable: "1"}) == [name, "1"]


def test_other_variables_are_ignored():
    environ = {"VLLM_PORT": "1", "SM_HP_LR": "2", "XSM_VLLM_A": "3", "sm_vllm_a": "4", "PATH": "5"}
    assert vllm_flags(environ) == []
    assert arguments_from({**environ, "HF_MODEL_ID": "m"}, model_dir=NOWHERE) == ["m", *PLATFORM]


# ---- the model ----


@pytest.mark.parametrize("has_files", [False, True])
@pytest.mark.parametrize("hub_id", ["", "hub/name"])
@pytest.mark.parametrize("named", [None, "named/one", "false"])
def test_model_is_the_first_that_is_there(tmp_path, named, hub_id, has_files):
    if has_files:
        (tmp_path / "config.json").write_text("{}")
    environ = {"HF_MODEL_ID": hub_id} | ({} if named is None else {PREFIX + "MODEL": named})
    expected = "named/one" if named == "named/one" else str(tmp_path) if has_files else hub_id
    if expected:
        assert arguments_from(environ, model_dir=tmp_path) == [expected, *PLATFORM]
    else:
        with pytest.warns(UserWarning, match="The small bundled model is served"):
            assert arguments_from(environ, model_dir=tmp_path) == PLATFORM


@pytest.mark.parametrize("value", ["", "true", '["a", "b"]', "--help", "-h", '[""]'])
def test_model_that_is_none(value):
    with pytest.raises(UserError, match="SM_VLLM_MODEL"):
        arguments_from({PREFIX + "MODEL": value}, model_dir=NOWHERE)


def test_model_id_that_looks_like_an_option():
    with pytest.raises(UserError, match=r"HF_MODEL_ID is '--help'"):
        arguments_from({"HF_MODEL_ID": "--help"}, model_dir=NOWHERE)


def test_model_folder_that_is_a_file(tmp_path):
    file = tmp_path / "model"
    file.write_text("")
    assert arguments_from({"HF_MODEL_ID": "m"}, model_dir=file)[0] == "m"


def test_model_folder_that_fails(monkeypatch, tmp_path):
    def fail(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        arguments_from({"HF_MODEL_ID": "m"}, model_dir=tmp_path)


def test_model_of_the_command_line():
    """It wins: none is looked for, and none missing is no matter."""
    environ = {"HF_MODEL_ID": "hub/name", PREFIX + "MODEL": "named/one", PREFIX + "SEED": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = arguments_from(environ, model_dir=NOWHERE, with_model=False)
        assert arguments_from({}, model_dir=NOWHERE, with_model=False) == PLATFORM
        # The settings find this one by themselves.
        assert arguments_from({"PEAGLE_TARGET": "x"}, model_dir=NOWHERE) == PLATFORM
    assert got == [*PLATFORM, "--seed", "1"]


# ---- vLLM's options as ours ----


@pytest.mark.parametrize(
    ("variable", "value", "arguments"),
    [
        ("SPECULATIVE_CONFIG", HEAD, ["--speculative-config", HEAD]),
        # Its parser says what is wrong with it.
        ("SPECULATIVE_CONFIG", '{"broken', ["--speculative-config", '{"broken']),
        ("SERVED_MODEL_NAME", "coder", ["--served-model-name", "coder"]),
        ("SERVED_MODEL_NAME", '["coder"]', ["--served-model-name", "coder"]),
        ("MAX_MODEL_LEN", "8192", ["--max-model-len", "8192"]),
        ("MAX_MODEL_LEN", "8k", ["--max-model-len", "8000"]),
        ("MAX_MODEL_LEN", "8K", ["--max-model-len", "8192"]),
        ("MAX_MODEL_LEN", "25.6k", ["--max-model-len", "25600"]),
        ("MAX_NUM_SEQS", "64", ["--max-num-seqs", "64"]),
        ("MAX_NUM_BATCHED_TOKENS", "2M", ["--max-num-batched-tokens", "2097152"]),
        ("MAX_NUM_QUEUED_REQS", "100", ["--max-queue", "100"]),
        ("DTYPE", "bfloat16", ["--dtype", "bfloat16"]),
        ("DTYPE", "half", ["--dtype", "float16"]),
        ("DTYPE", "float", ["--dtype", "float32"]),
        ("DEVICE", "cuda", ["--device", "cuda"]),
        ("SEED", "5", ["--seed", "5"]),
        ("GPU_MEMORY_UTILIZATION", "0.85", ["--gpu-memory-utilization", "0.85"]),
        ("DEVICE_MEMORY_UTILIZATION", "0.85", ["--gpu-memory-utilization", "0.85"]),
        ("KV_CACHE_MEMORY_BYTES", "3G", ["--kv-cache-gib", "3.0"]),
        ("KV_CACHE_MEMORY_BYTES", "1610612736", ["--kv-cache-gib", "1.5"]),
        ("DATA_PARALLEL_SIZE", "4", ["--data-parallel-size", "4"]),
        ("BLOCK_SIZE", "32", ["--block-size", "32"]),
        ("KV_CACHE_DTYPE", "auto", ["--kv-cache-dtype", "auto"]),
        ("KV_CACHE_DTYPE", "fp8_e4m3", ["--kv-cache-dtype", "fp8"]),
        ("NUM_GPU_BLOCKS_OVERRIDE", "512", ["--num-kv-blocks", "512"]),
        ("CHAT_TEMPLATE", "/opt/ml/model/t.jinja", ["--chat-template", "/opt/ml/model/t.jinja"]),
        ("TOOL_CALL_PARSER", "hermes", ["--tool-call-parser", "hermes"]),
        ("REVISION", "v1.0", ["--revision", "v1.0"]),
        (
            "ALLOWED_ORIGINS",
            '["https://a", "https://b"]',
            ["--allowed-origin", "https://a", "--allowed-origin", "https://b"],
        ),
        ("ALLOWED_ORIGINS", "https://a", ["--allowed-origin", "https://a"]),
        ("ENFORCE_EAGER", "true", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "false", []),
        ("NO_ENABLE_PREFIX_CACHING", "true", ["--no-prefix-caching"]),
        ("MAX_MODEL_LEN", "false", []),
        ("TENSOR_PARALLEL_SIZE", "false", []),
        ("TRUST_REMOTE_CODE", "false", []),
        ("NEVER_HEARD_OF", "false", []),
    ],
)
def test_taken(variable, value, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours({variable: value}) == [*PLATFORM, *arguments]


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"PORT": "9000"}, [*HOST, *DRAIN, *MINUTELY, "--port", "9000"]),
        ({"HOST": "::"}, [*PORT, *DRAIN, *MINUTELY, "--host", "::"]),
        # A value may look like an option.
        ({"HOST": "--port"}, [*PORT, *DRAIN, *MINUTELY, "--host", "--port"]),
        ({"SHUTDOWN_TIMEOUT": "10"}, [*HOST, *PORT, *MINUTELY, "--drain-timeout", "10"]),
    ],
)
def test_platform_defaults_give_way(variables, arguments):
    assert ours(variables) == arguments


@pytest.mark.parametrize(("said", "seconds"), [("10", "10"), ("0", "0"), ("", "60")])
def test_how_often_cloudwatch_is_told(said, seconds):
    environ = {"HF_MODEL_ID": "m", "PEAGLE_CLOUDWATCH_INTERVAL": said}
    assert arguments_from(environ, model_dir=NOWHERE)[-2:] == ["--cloudwatch-interval", seconds]


@pytest.mark.parametrize(("bound", "port"), [("8081", "8081"), ("", "8080")])
def test_port_of_a_container_that_shares_its_host(bound, port):
    environ = {"HF_MODEL_ID": "m", "SAGEMAKER_BIND_TO_PORT": bound}
    assert arguments_from(environ, model_dir=NOWHERE)[3:5] == ["--port", port]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DISABLE_LOG_REQUESTS", "true"),
        ("DISABLE_LOG_STATS", ""),
        ("ENABLE_AUTO_TOOL_CHOICE", "true"),
        ("ENABLE_PREFIX_CACHING", "true"),
        ("ENABLE_CHUNKED_PREFILL", "true"),
        ("SWAP_SPACE", "4"),
        ("COMPILATION_CONFIG", '{"level": 3}'),
        ("TENSOR_PARALLEL_SIZE", "1"),
        ("PIPELINE_PARALLEL_SIZE", "1"),
        ("LOAD_FORMAT", "safetensors"),
        ("CPU_OFFLOAD_GB", "0"),
        ("TASK", "generate"),
    ],
)
def test_dropped_with_a_warning(variable, value):
    with pytest.warns(UserWarning) as caught:
        assert ours({variable: value}) == PLATFORM
    (warning,) = caught
    assert str(warning.message).startswith(f"{PREFIX}{variable} is {value!r}: dropped")


def test_false_that_does_not_turn_off():
    with pytest.warns(UserWarning, match="set SM_VLLM_NO_ENABLE_PREFIX_CACHING=true"):
        assert ours({"ENABLE_PREFIX_CACHING": "false"}) == PLATFORM


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("TENSOR_PARALLEL_SIZE", "8", "expected 1. One engine runs on one GPU"),
        ("PIPELINE_PARALLEL_SIZE", "2", "expected 1. One engine runs on one GPU"),
        ("TENSOR_PARALLEL_SIZE", "", "expected 1"),
        ("QUANTIZATION", "fp8", "Serve the model in the type it is stored in"),
        ("ENABLE_LORA", "true", "Merge the adapter"),
        ("LORA_MODULES", '["a=b", "c=d"]', "Merge the adapter"),
        ("TRUST_REMOTE_CODE", "true", "never run here"),
        ("LOAD_FORMAT", "pt", "expected auto or safetensors. Convert"),
        ("KV_CACHE_DTYPE", "fp8_e5m2", "expected auto, fp8 or fp8_e4m3"),
        ("GENERATION_CONFIG", "vllm", "expected auto"),
        ("SPEC_MODEL", "a/b", "SM_VLLM_SPECULATIVE_CONFIG"),
        ("DOWNLOAD_DIR", "/tmp/x", "HF_HOME"),
        ("TOKENIZER", "a/b", "model's folder"),
        ("TOOL_CALL_PARSER", "deepseek_v3", "expected one of auto, gemma4"),
        ("MAX_MODEL_LEN", "auto", "expected a whole number, like 8192, 8k or 8K"),
        ("MAX_MODEL_LEN", "1.5K", "expected a whole number"),
        ("MAX_MODEL_LEN", "1.5", "expected a whole number"),
        ("MAX_MODEL_LEN", "-1", "expected a whole number"),
        ("MAX_MODEL_LEN", "\N{ARABIC-INDIC DIGIT FIVE}", "expected a whole number"),
        ("MAX_MODEL_LEN", "true", "expected one value for --max-model-len"),
        ("SERVED_MODEL_NAME", '["a", "b"]', "expected one value for --served-model-name"),
        ("ALLOWED_ORIGINS", "", "expected a value for --allowed-origins"),
        ("ENFORCE_EAGER", "True", "expected true or false"),
        ("REASONING_PARSER", "qwen3", "no --reasoning-parser"),
        ("MAX_MODEL_LENGTH", "4096", "Did you mean SM_VLLM_MAX_MODEL_LEN?"),
        ("NEVER_HEARD_OF", "1", "Unset the variable."),
        ("", "1", "Unset the variable."),
    ],
)
def test_refused(variable, value, remedy):
    with pytest.raises(UserError) as caught:
        ours({variable: value})
    message = str(caught.value)
    assert message.startswith(f"{PREFIX}{variable} is {value!r}")
    assert remedy in message


@pytest.mark.parametrize("variable", ["API_KEY", "HF_TOKEN", "SOME_SECRET", "DB_PASSWORD"])
def test_secrets_are_not_shown(variable):
    with pytest.raises(UserError) as caught:
        ours({variable: "hush-hush"})
    assert f"{PREFIX}{variable}" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_long_values_are_cut():
    with pytest.raises(UserError) as caught:
        ours({"HF_OVERRIDES": "x" * 10_000})
    assert "x" * 50 in str(caught.value) and len(str(caught.value)) < 500


def test_one_option_of_two_variables():
    with pytest.raises(UserError, match="SM_VLLM_SEED and SM_VLLM_seed are both --seed"):
        ours({"SEED": "1", "seed": "2"})
    assert ours({"SEED": "false", "seed": "2"})[-2:] == ["--seed", "2"]


def test_trees_are_left_to_the_configuration():
    from peagle.config import SpeculativeConfig

    text = json.dumps({**json.loads(HEAD), "parallel_drafting_spec": {"trees": 2}})
    *_, name, passed = ours({"SPECULATIVE_CONFIG": text})
    assert (name, passed) == ("--speculative-config", text)
    with pytest.raises(UserError, match="parallel_drafting_spec"):
        SpeculativeConfig.parse(passed)


# ---- anything ----

KNOWN = [name[2:].replace("-", "_").upper() for name in [*RULES, "--model"]]
NAMES = st.sampled_from(KNOWN) | st.text(string.ascii_letters + string.digits + "_", max_size=12)
# No NUL: the operating system has none in a variable. Surrogates stand for bytes that are no UTF-8.
TEXT = st.text(st.characters(exclude_characters="\0"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
VALUES = TEXT | st.sampled_from(["true", "", "1", "8k", "auto"]) | JSON.map(json.dumps)


@pytest.mark.slow
@given(NAMES, VALUES.filter(lambda value: value != "false"))
def test_no_variable_is_silently_ignored(name, value):
    """It is in the arguments, or a warning or an error names it."""
    variable = PREFIX + name
    bare = arguments_from({"HF_MODEL_ID": "m"}, model_dir=NOWHERE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = arguments_from({variable: value, "HF_MODEL_ID": "m"}, model_dir=NOWHERE)
        except UserError as error:
            assert variable in str(error)
            return
    named = any(variable in str(warning.message) for warning in caught)
    assert named == (got == bare) or _same_as_default(variable, value)
    assert all(isinstance(argument, str) for argument in got)


def _same_as_default(variable: str, value: str) -> bool:
    """The model "m" named in two places."""
    (flag,) = vllm_flags({variable: value})
    return (flag.name, flag.tokens) == ("--model", ("m",))


@given(st.dictionaries(st.text(max_size=8) | NAMES.map(PREFIX.__add__), VALUES, max_size=6))
def test_any_environment_is_read_or_refused(environ):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = arguments_from(environ, model_dir=NOWHERE)
        except UserError:
            return
    assert {"--host", "--port", "--drain-timeout", "--cloudwatch-interval"} <= set(got)


@given(st.lists(TEXT, max_size=4))
def test_arrays_keep_their_elements(elements):
    assert vllm(X=json.dumps(elements)) == ["--x", *elements]


# ---- agreement with the command ----


def test_the_command_has_every_option_that_is_made():
    """`peagle serve` takes what the environment becomes, and `--sagemaker` itself."""
    from peagle.cli.main import LazyCommand

    command = LazyCommand("serve").load()
    known = {name for parameter in command.params for name in parameter.opts}
    made = {"--sagemaker", "--host", "--port", "--drain-timeout", "--cloudwatch-interval"}
    for name in RULES:
        variable = PREFIX + name[2:].replace("-", "_").upper()
        for value in ("1", "true", "auto"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    _, *rest = arguments_from(
                        {variable: value, "HF_MODEL_ID": "m"}, model_dir=NOWHERE
                    )
                except UserError:
                    continue
            made |= {argument for argument in rest if argument.startswith("--")}
    assert len(made) > 20
    assert made <= known
