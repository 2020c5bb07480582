"""Flags handed on to vLLM: unsafe ones are refused however they are written."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.backends.vllm.checks import _OWN_FLAGS, _REFUSED, _WHOLE_FLAGS, check_flags
from peagle.backends.vllm.launch import VllmLaunch
from peagle.errors import UserError


def check(*extra: str) -> list[str]:
    return list(check_flags(extra))


@pytest.mark.parametrize(
    "extra",
    [
        ["--trust-remote-code"],
        ["--trust_remote_code"],
        ["--trust-remote"],
        ["--load-format", "pt"],
        ["--load-format=auto"],
        ["--load_format", "npcache"],
        ["--load-format"],
        ["--api-key", "secret"],
        ["--middleware=my.module"],
        ["--config", "file.yaml"],
        ["--disable-log-stats"],
        ["--speculative-config", "{}"],
        ["--speculative-config.method", "eagle3"],
        ["-sc", "{}"],
        ["-tp", "2"],
        ["-tp=2"],
        ["--tensor_parallel_size=2"],
        ["--spec-tok", "3"],
        ["--kv-cache-dtype", "fp8", "--host", "0.0.0.0"],
        ["--headless"],
    ],
)
def test_refused(extra):
    with pytest.raises(UserError) as error:
        check(*extra)
    assert any(word.partition("=")[0] in str(error.value) for word in extra)


@pytest.mark.parametrize(
    "extra",
    [
        ["--kv-cache-dtype", "fp8"],
        ["--distributed-executor-backend", "ray"],
        ["--load-format", "runai_streamer"],
        ["--reasoning-parser", "qwen3"],
        ["--data-parallel-size-local", "2"],
        ["--chat-template-content-format", "openai"],
        ["-O3"],
        ["--stream-interval", "-1"],
        ["--no-trust-remote-code"],
        ["--compilation-config.mode", "3"],
    ],
)
def test_handed_on(extra):
    assert check(*extra) == []


def test_secrets_are_not_repeated():
    with pytest.raises(UserError) as error:
        check("--api-key=hunter2")
    assert "hunter2" not in str(error.value)


def test_told():
    (note,) = check("--allowed-local-media-path=/data")
    assert note.startswith("--allowed-local-media-path: clients may read files")


def test_has_flag():
    assert VllmLaunch("m", extra=("--a_b=3",)).has_flag("--a-b")
    assert not VllmLaunch("m", extra=("--a", "b")).has_flag("--b")


@given(st.data())
def test_argparse_reads_no_more_than_is_refused(data):
    """vLLM reads its command line with argparse, dashes for underscores: the reference."""
    flags = sorted({*_OWN_FLAGS, *_REFUSED})
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    for flag in flags:
        parser.add_argument(flag, nargs="?", dest=flag, const="given")
    for fine in _WHOLE_FLAGS:
        parser.add_argument(fine, nargs="?", dest=fine, const="given")
    flag = data.draw(st.sampled_from(flags))
    word = flag[: data.draw(st.integers(2, len(flag)))]
    written = word[:2] + "".join(
        data.draw(st.sampled_from("-_")) if c == "-" else c for c in word[2:]
    )
    written += data.draw(st.sampled_from(["", "=x"]))
    try:
        read, unknown = parser.parse_known_args([written[:2] + written[2:].replace("_", "-")])
    except (argparse.ArgumentError, SystemExit):
        return  # ambiguous: vLLM refuses it
    if any(vars(read)[flag] for flag in flags):
        assert not unknown
        with pytest.raises(UserError):
            check(written)
