"""Sampling, structure and engine options of `generate`: flags, variables, files, mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.generate import _in_order
from peagle.cli.groups import OutputFormat
from peagle.evaluation.prompts import Prompt
from tests.cli.conftest import Pair, Peagle, Result, without_defaults

SCHEMA = "{}"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PEAGLE_"):
            monkeypatch.delenv(name)


def shown(result: Result, section: str = "sampling") -> dict[str, Any]:
    """Values that are not defaults."""
    assert (result.status, result.err) == (0, "")
    return without_defaults(section, json.loads(result.out)[section])


# ---- what is set ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--typical-p", "0.9"], "typical_p", 0.9),
        (["--repetition-penalty", "1.2"], "repetition_penalty", 1.2),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "1"], "frequency_penalty", 1.0),
        (["--min-tokens", "4"], "min_tokens", 4),
        (["--logprobs", "0"], "logprobs", 0),
        (["--prompt-logprobs", "3"], "prompt_logprobs", 3),
        (["--stop-token-id", "7", "--stop-token-id", "9"], "stop_token_ids", [7, 9]),
        (["--allowed-token-id", "7"], "allowed_token_ids", [7]),
        (["--bad-word", "a", "--bad-word", "b c"], "bad_words", ["a", "b c"]),
        (["--ignore-eos"], "ignore_eos", True),
        (
            ["--logit-bias", '{"42": -5, "7": "-inf", "8": -Infinity}'],
            "logit_bias",
            {"42": -5.0, "7": "-inf", "8": "-inf"},
        ),
        (["--json-object"], "structured_output", {"kind": "json", "source": "", "compact": False}),
        (
            ["--json-schema", SCHEMA],
            "structured_output",
            {"kind": "json_schema", "source": SCHEMA, "compact": False},
        ),
        (
            ["--regex", "[0-9]+"],
            "structured_output",
            {"kind": "regex", "source": "[0-9]+", "compact": False},
        ),
    ],
)
def test_a_flag_sets_its_parameter(peagle: Peagle, flags: list[str], key: str, value: Any) -> None:
    result = peagle("generate", "--target", "org/x", "--show-config", *flags)
    assert shown(result) == {key: value}


def test_a_number_of_outputs(peagle: Peagle) -> None:
    call = ("generate", "--target", "org/x", "--show-config", "--n", 3, "--temperature", 1)
    assert shown(peagle(*call)) == {"n": 3, "temperature": 1.0}


def test_structures_from_files(peagle: Peagle, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(SCHEMA)
    grammar.write_text('root ::= "yes" | "no"')
    call = ("generate", "--target", "org/x", "--show-config")
    for flag, file, kind in (
        ("--json-schema", schema, "json_schema"),
        ("--ebnf", grammar, "ebnf"),
    ):
        value = {"kind": kind, "source": file.read_text(), "compact": False}
        assert shown(peagle(*call, flag, file)) == {"structured_output": value}


def test_engine_and_draft_flags(peagle: Peagle) -> None:
    call = ("generate", "--target", "org/x", "--draft", "org/h", "--show-config")
    sizes = ("--max-model-len", 64, "--max-num-batched-tokens", 32, "--kv-cache-gib", 0.5)
    sizes += ("--gpu-memory-utilization", 0.6)
    result = peagle(*call, *sizes, "--no-prefix-caching", "--draft-max-len", 48)
    assert shown(result, "engine") == {
        "max_model_len": 64,
        "max_num_batched_tokens": 32,
        "kv_cache_gib": 0.5,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
    }
    assert shown(result, "speculative")["max_model_len"] == 48


def test_a_limit_of_one_head_is_not_that_of_another(peagle: Peagle, tmp_path: Path) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text('target = "org/x"\nspeculative = { model = "org/h", max_model_len = 9 }')
    call = ("generate", "--config", path, "--show-config")
    assert shown(peagle(*call), "speculative")["max_model_len"] == 9
    assert "max_model_len" not in shown(peagle(*call, "--draft", "org/i"), "speculative")
    assert "max_model_len" not in shown(peagle(*call, "--method", "ngram"), "speculative")


def test_a_file_and_a_variable_set_them_too(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text(
        'target = "org/x"\n'
        "[engine]\nenable_prefix_caching = true\nmax_num_batched_tokens = 99\n"
        "[sampling]\nmin_p = 0.2\n"
        "logit_bias = { 42 = -5, 43 = -inf }\n"
        'structured_output = { kind = "json_schema", source = {} }\n'
    )
    call = ("generate", "--config", path, "--show-config")
    in_file = {
        "min_p": 0.2,
        "logit_bias": {"42": -5.0, "43": "-inf"},
        "structured_output": {"kind": "json_schema", "source": SCHEMA, "compact": False},
    }
    assert shown(peagle(*call)) == in_file
    variable = '{"min_p": 0.3, "structured_output": {"kind": "json"}, "logit_bias": {"1": 2}}'
    monkeypatch.setenv("PEAGLE_SAMPLING", variable)
    monkeypatch.setenv("PEAGLE_ENABLE_PREFIX_CACHING", "false")
    expected = in_file | {
        "min_p": 0.3,
        "logit_bias": {"1": 2.0},
        "structured_output": {"kind": "regex", "source": "a+", "compact": False},
    }
    result = peagle(*call, "--regex", "a+")
    assert shown(result) == expected
    assert shown(result, "engine") == {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 99,
    }


# ---- several outputs ------------------------------------------------------------------------


class Output:
    """A finished output."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_json(self) -> dict[str, str]:
        return {"text": self.text}


class Chunk:
    """The last chunk of an output."""

    def __init__(self, index: int, output_index: int) -> None:
        self.index, self.output_index = index, output_index
        self.output = Output(f"{index}{output_index}")


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_outputs_are_printed_in_order(
    capsys: pytest.CaptureFixture[str], output_format: OutputFormat
) -> None:
    show = _in_order([Prompt("p", ("x",)), Prompt("q", ("y",))], 2, output_format)
    for index, output_index in ((1, 1), (0, 1), (0, 0), (1, 0)):
        show(Chunk(index, output_index))  # type: ignore[arg-type]
        if (index, output_index) == (0, 1):
            assert capsys.readouterr().out == "", "the first one is not there yet"
    expected = [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
    out = capsys.readouterr().out
    texts = dict(zip(expected, ("00", "01", "10", "11"), strict=True))
    if output_format is OutputFormat.TEXT:
        assert out == "".join(f"=== {id} #{i}\n{texts[id, i]}\n" for id, i in expected)
    else:
        records = [json.loads(line) for line in out.splitlines()]
        assert records == [{"id": id, "index": i, "text": texts[id, i]} for id, i in expected]


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-p", "2"], "--min-p: min_p is 2.0; expected a number from 0 to 1"),
        (["--typical-p", "0"], "--typical-p: typical_p is 0.0; expected"),
        (["--repetition-penalty", "0"], "--repetition-penalty: repetition_penalty is 0.0"),
        (["--presence-penalty", "3"], "--presence-penalty: presence_penalty is 3.0; expected a"),
        (["--frequency-penalty", "nan"], "--frequency-penalty: frequency_penalty is nan"),
        (["--min-tokens", "-1"], "--min-tokens: min_tokens is -1; expected"),
        (["--min-tokens", "200"], "--min-tokens: min_tokens is 200 and max_tokens 128"),
        (["--logprobs", "21"], "--logprobs: logprobs is 21; expected a whole number from 0 to 20"),
        (["--prompt-logprobs", "-1"], "--prompt-logprobs: prompt_logprobs is -1; expected"),
        (["--n", "0"], "--n: n is 0; expected"),
        (["--n", "2"], "--n: n is 2 and temperature 0: greedy outputs are all the same"),
        (["--stop-token-id", "-1"], "--stop-token-id: stop_token_ids is -1; expected"),
        (["--stop-token-id", "end"], "--stop-token-id"),
        (["--allowed-token-id", "-1"], "--allowed-token-id: allowed_token_ids is -1; expected"),
        (["--bad-word", ""], "--bad-word: bad_words is ''; expected texts that are not empty"),
        (["--logit-bias", "42"], "--logit-bias: '42' is not a JSON object; expected one, like"),
        (["--logit-bias", "{42: 1}"], "--logit-bias: '{42: 1}' is not a JSON object"),
        (["--logit-bias", '{"a": 1}'], "logit_bias has the key 'a'; expected token ids, like '42'"),
        (["--logit-bias", '{"42": "x"}'], "--logit-bias: logit_bias is 'x'; expected finite"),
        (["--json-schema", "{"], "--json-schema: json_schema is not JSON"),
        (["--json-schema", "none.json"], "--json-schema: the file 'none.json' is not readable: No"),
        (["--ebnf", "none.gbnf"], "--ebnf: the file 'none.gbnf' is not readable: No such file"),
        (["--regex", ""], "--regex: regex is ''; expected text that is not empty"),
        (["--regex", "a", "--json-object"], "--json-object and --regex contradict each other"),
        (["--ebnf", "a", "--json-schema", "{}"], "--json-schema and"),
        (["--regex", "a", "--ignore-eos"], "structured_output and ignore_eos were both given"),
        (["--regex", "a", "--min-tokens", "2"], "structured_output and min_tokens 2 were both"),
        (["--regex", "a", "--bad-word", "b"], "structured_output and bad_words ('b',) were both"),
        (["--max-model-len", "0"], "--max-model-len: max_model_len is 0; expected"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens: max_num_batched_tokens is"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib: kv_cache_gib is 0.0; expected a number above"),
        (["--draft-max-len", "9"], "--draft-max-len was given, but no draft head for"),
        (
            ["--method", "ngram", "--draft-max-len", "9"],
            "--draft-max-len: max_model_len is 9; expected no max_model_len with method",
        ),
        (
            ["--draft", "h", "--draft-window", "-1"],
            "--draft-window: draft_window is -1; expected a whole number, 0 for no window, or none",
        ),
        (
            ["--draft", "h", "--draft-max-len", "0"],
            "--draft-max-len: max_model_len is 0; expected a whole number of at least 1",
        ),
    ],
)
def test_bad_flags(peagle: Peagle, flags: list[str], message: str) -> None:
    result = peagle("generate", "--target", "org/x", "--prompt", "x", *flags)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.startswith("peagle: error: ") and "Traceback" not in result.err


def test_a_stop_list_of_thousands(peagle: Peagle) -> None:
    stops = [part for number in range(3000) for part in ("--stop", str(number))]
    result = peagle("generate", "--target", "org/x", "--prompt", "x", *stops)
    assert (result.status, result.out) == (2, "")
    assert "--stop: stop is '3000 strings'; expected at most 64" in result.err
    assert len(result.err) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("structured_output = 'json'", "structured_output is 'json'; expected a table with kind"),
        ("structured_output = { source = 'x' }", "expected a table with kind and source"),
        ("structured_output = { kind = 'x' }", "structured output kind is 'x'; expected one of"),
        ("structured_output = { kind = 'json', source = 'x' }", "source is 'x'; expected none"),
        ("logit_bias = { a = 1 }", "logit_bias has the key 'a'"),
        ("logit_bias = 5", "logit_bias is 5; expected a mapping"),
        ("min_p = 2", "min_p is 2"),
    ],
)
def test_bad_files_and_variables(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text(f'target = "org/x"\n[sampling]\n{text}')
    result = peagle("generate", "--config", path, "--prompt", "x")
    assert (result.status, result.out) == (2, "")
    assert message in result.err and f"{path} [sampling]: " in result.err
    for value in ("[]", "{", '{"top": 1}', '{"min_p": "x"}'):
        monkeypatch.setenv("PEAGLE_SAMPLING", value)
        result = peagle("generate", "--target", "org/x", "--prompt", "x")
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("peagle: error: PEAGLE_SAMPLING: ")


def test_log_probabilities_want_json(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--max-new-tokens", 2, "--logprobs", 1)
    assert "see them with --format json" in peagle(*call).err
    assert "--format json" not in peagle(*call, "--format", "json").err


def test_several_outputs_of_a_prompt(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--max-new-tokens", 4, "--n", 3)
    result = peagle(*call, "--temperature", 1, "--seed", 1)
    assert result.status == 0, result.err
    headings = [line for line in result.out.splitlines() if line.startswith("===")]
    assert headings == ["=== 1 #0", "=== 1 #1", "=== 1 #2"]
    result = peagle(*call, "--temperature", 1, "--seed", 1, "--format", "json")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [(record["id"], record["index"]) for record in records] == [("1", i) for i in range(3)]
    count = sum(len(record["token_ids"]) for record in records)
    assert result.err.startswith(f"{count} tokens in ")
