"""`peagle generate`: what it prints, and what it refuses."""

import io
import json
import shutil
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams
from tests.cli.conftest import Pair, Peagle

PROMPTS = ["def f(x):", "import numpy as", "class Stack:\n"]
FIELDS = [
    "id",
    "text",
    "token_ids",
    "finish_reason",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "acceptance_length",
    "num_cached_tokens",
    "num_preemptions",
    "queue_time_s",
    "time_to_first_token_s",
    "elapsed_s",
]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Greedy outputs of the target alone."""
    outputs = LLM(pair.target).generate(PROMPTS, SamplingParams(max_tokens=12))
    return [output.token_ids for output in outputs]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [{"id": f"p/{i}", "turns": [text, "more"]} for i, text in enumerate(PROMPTS)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


# ---- output ----


def test_json_has_exactly_the_promised_fields(peagle: Peagle, pair: Pair) -> None:
    result = peagle(
        *("generate", *pair.options, "--prompt", PROMPTS[0], "--max-new-tokens", 12),
        *("--format", "json", "-k", 3),
    )
    assert result.status == 0, result.err
    (line,) = result.out.splitlines()
    record = json.loads(line)
    assert list(record) == FIELDS
    assert record["finish_reason"] in ("stop", "length")
    assert len(record["num_accepted_tokens_per_pos"]) == 3
    assert record["num_draft_tokens"] == 3 * record["num_drafts"] > 0
    assert record["num_accepted_tokens"] == sum(record["num_accepted_tokens_per_pos"])
    assert record["acceptance_length"] >= 1
    assert record["elapsed_s"] > 0


@pytest.mark.parametrize(
    "drafting",
    [
        ["-k", "2"],
        ["--no-speculation"],
        ["--method", "ngram", "-k", "4"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
    ],
    ids=lambda options: options[0].strip("-"),
)
def test_many_prompts_keep_their_order(
    peagle: Peagle, pair: Pair, prompt_file: Path, expected: list[list[int]], drafting: list[str]
) -> None:
    draft = ["--draft", pair.peagle] if drafting[0] == "-k" else []
    result = peagle(
        *("generate", "--target", pair.target, *draft, *drafting, "--prompts", prompt_file),
        *("--max-new-tokens", 12, "--max-num-seqs", 2, "--format", "json"),
    )
    assert result.status == 0, result.err
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["id"] for record in records] == ["p/0", "p/1", "p/2"]
    assert [record["token_ids"] for record in records] == expected
    assert "3 of 3 prompts have further turns" in result.err


def test_an_eagle3_head_has_no_correction_to_leave_out(peagle: Peagle, pair: Pair) -> None:
    words = ("--prompt", PROMPTS[0], "--max-new-tokens", 2, "--no-correction")
    result = peagle("generate", "--target", pair.target, "--draft", pair.eagle3, *words)
    line = f"note: --no-correction: the EAGLE-3 head {str(pair.eagle3)!r} has none"
    assert result.status == 0 and result.err.count(line) == 1, result.err


def test_text_is_the_completion_and_statistics_go_to_stderr(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", PROMPTS[0], "--max-new-tokens", 12)
    text = json.loads(peagle(*call, "--format", "json").out)["text"]
    result = peagle(*call)
    assert result.out == text + "\n"
    assert "tokens/s" in result.err
    assert "acceptance length" in result.err
    assert "at K=7, temperature 0, float32" in result.err


def test_an_empty_text_of_a_chat_model_points_to_chat(
    peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    folder = shutil.copytree(pair.target, tmp_path / "chat")
    call = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 1)
    hint = "`peagle chat` asks this chat model"
    first = peagle(*call).out.removesuffix("\n")
    assert hint not in peagle(*call, "--stop", first).err
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert hint in peagle(*call, "--stop", first).err
    assert hint not in peagle(*call).err


def test_text_of_many_prompts_names_each(peagle: Peagle, pair: Pair, prompt_file: Path) -> None:
    result = peagle("generate", *pair.options, "--prompts", prompt_file, "--max-new-tokens", 4)
    assert [line for line in result.out.splitlines() if line.startswith("===")] == [
        "=== p/0",
        "=== p/1",
        "=== p/2",
    ]


def test_a_target_without_a_head_decodes_plainly_and_says_so(peagle: Peagle, pair: Pair) -> None:
    result = peagle("generate", "--target", pair.target, "--prompt", "x", "--max-new-tokens", 4)
    assert result.status == 0
    assert "no --draft: decoding plainly" in result.err
    assert "no speculation" in result.err


def test_standard_input(
    peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPTS[0].encode() + b"\n")))
    result = peagle(
        *("generate", *pair.options, "--prompts", "-", "--max-new-tokens", 12, "--format", "json")
    )
    assert json.loads(result.out)["token_ids"] == expected[0]


@pytest.mark.slow
def test_a_seed_repeats_a_sampled_output(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--temperature", 1, "--format", "json")
    call += ("--max-new-tokens", 12, "--draft-sampling", "probabilistic", "--dtype", "float64")
    outputs = [json.loads(peagle(*call, "--seed", s).out)["token_ids"] for s in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_an_fp8_kv_cache(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", PROMPTS[0], "--max-new-tokens", 12)
    result = peagle(*call, "--kv-cache-dtype", "fp8", "--show-memory")
    assert result.status == 0, result.err
    assert " of fp8, scales 1: " in result.err
    assert "temperature 0, float32, fp8 KV cache" in result.err
    assert "KV cache" not in peagle(*call).err


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "neither was given"),
        (["--prompt", "x", "--prompts", "y"], "both was given"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompts", "nowhere.jsonl"], "'nowhere.jsonl' is not readable: No such file"),
        (["--prompts", "."], "'.' is not readable: Is a directory"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "x", "--top-k", "-2"], "top_k is -2"),
        (["--prompt", "x", "--top-p", "0"], "top_p is 0.0"),
        (["--prompt", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "x", "--seed", str(-(2**63) - 1)], "seed is -9223372036854775809"),
        (["--prompt", "x", "-k", "0"], "num_speculative_tokens is 0"),
        (["--prompt", "x", "--num-speculative-tokens", "65"], "num_speculative_tokens is 65"),
        (["--prompt", "x", "--method", "medusa"], "method is 'medusa'"),
        (["--prompt", "x", "--draft-sampling", "x"], "draft_sampling is 'x'"),
        (["--prompt", "x", "--dtype", "int8"], "dtype is 'int8'"),
        (["--prompt", "x", "--kv-cache-dtype", "int8"], "expected one of auto, fp8"),
        (["--prompt", "x", "--fp8-activations", "on"], "expected one of auto, off"),
        (["--prompt", "x", "--device", "abacus"], "device is 'abacus'"),
        (["--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--prompt", "x", "--threads", "0"], "--threads is 0"),
        (["--prompt", "x", "--no-speculation"], "--no-speculation and --draft contradict"),
        (["--prompt", "x", "--speculative-config", "{}"], "--speculative-config and --draft"),
        (["--prompt", "x" * 3000], "The prompt has 3000 tokens; expected at most 2047"),
    ],
)
def test_bad_options(peagle: Peagle, pair: Pair, options: list[str], message: str) -> None:
    result = peagle("generate", *pair.options, *options)
    assert result.status == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.startswith("peagle: error: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", "[]"], "expected a JSON object"),
        (["--speculative-config", '{"k": 3}'], "Unknown key 'k'"),
        (["--speculative-config", "{}", "-k", "3"], "--speculative-config and --num-spec"),
        (["--speculative-config", "{}", "--no-speculation"], "--speculative-config contradict"),
        (["--no-speculation", "-k", "3"], "--no-speculation and --num-speculative-tokens"),
        (["-k", "3"], "--num-speculative-tokens was given, but no draft head"),
        (["--draft", "nowhere"], "'nowhere' is not there"),
        (["--draft", "."], "has no config.json"),
        (["--method", "ngram", "--draft", "x"], "model is 'x'"),
    ],
)
def test_bad_speculation(peagle: Peagle, pair: Pair, options: list[str], message: str) -> None:
    result = peagle("generate", "--target", pair.target, "--prompt", "x", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_bad_models(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    def message(*options: object) -> str:
        result = peagle("generate", "--prompt", "x", *options)
        assert (result.status, result.out) == (2, "")
        return result.err

    assert "'nowhere' is not there" in message("--target", "nowhere", "--no-speculation")
    assert "no config.json" in message("--target", tmp_path, "--no-speculation")
    (tmp_path / "config.json").write_text((pair.target / "config.json").read_text())
    assert "no *.safetensors" in message("--target", tmp_path, "--no-speculation")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "is a pickle" in message("--target", tmp_path, "--no-speculation")
    head = "--draft", pair.target
    assert "is a whole model" in message("--target", pair.target, *head)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts: it is empty"),
        (b" \n\n", "has no prompts: it is empty"),
        (b'"a"\n\n{"id": 1,', "line 3: not JSON"),
        (b'"a"\nplain text\n', "line 2: not JSON"),
        (b'"a"\n""\n', "line 2: the prompt is empty"),
        (b'{"turns": ["a", ""]}\n', "line 1: the prompt is empty"),
        (b'{"turns": []}\n', "line 1: the prompt is []"),
        (b'{"prompt": 5}\n', "line 1: the prompt is [5]"),
        (b'{"prompt": "a", "turns": ["a"]}\n', 'line 1: expected {"id", "turns": [...]}'),
        (b'{"text": "a"}\n', 'line 1: expected {"id", "turns": [...]}'),
        (b'"a"\n[1, 2]\n', 'line 2: expected {"id", "turns": [...]}'),
        (b'{"id": [], "prompt": "a"}\n', "line 1: id is []"),
        (b"fine\n\xff\n", "line 2: not UTF-8"),
    ],
)
def test_bad_prompt_files(
    peagle: Peagle, pair: Pair, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    result = peagle("generate", *pair.options, "--prompts", path)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_nothing_is_generated_when_one_prompt_is_too_long(
    peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("fine\n" * 20 + "x" * 3000 + "\n")
    result = peagle("generate", *pair.options, "--prompts", path)
    assert (result.status, result.out) == (2, "")
    assert "Prompt 21 of 21: The prompt has 3000 tokens" in result.err


@pytest.mark.slow
def test_stop_strings_end_the_output(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "hello", "--format", "json")
    whole = json.loads(peagle(*call).out)["text"]
    stop = next(c for c in whole[1:] if c != "\ufffd")
    result = json.loads(peagle(*call, "--stop", "never there", "--stop", stop).out)
    assert result["finish_reason"] == "stop"
    assert result["text"] == whole[: whole.index(stop)]


def test_an_empty_stop_string_is_a_mistake(peagle: Peagle, pair: Pair) -> None:
    result = peagle("generate", *pair.options, "--prompt", "hello", "--stop", "")
    assert (result.status, result.out) == (2, "")
    assert "stop is ''; expected strings that are not empty" in result.err


def test_the_model_may_be_the_first_word(peagle: Peagle, pair: Pair) -> None:
    options = ("--prompt", "def", "--max-new-tokens", 4, "--format", "json", "--no-speculation")
    named, first = (
        peagle("generate", *target, *options)
        for target in (("--target", pair.target), [pair.target])
    )
    assert json.loads(first.out)["token_ids"] == json.loads(named.out)["token_ids"]
    both = peagle("generate", pair.target, "--target", "org/x", *options)
    assert both.status == 2 and "and --target were both given; leave one of them out" in both.err
    assert peagle("generate", "bundled", *options).status == 0
    nothing = peagle("generate", "def f(")
    assert "neither was given. 'def f(' is taken for the model." in nothing.err
