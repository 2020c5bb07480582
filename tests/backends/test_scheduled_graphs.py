"""Whole steps of each K of a schedule, on stand-ins for vLLM's dispatcher and runner.

The stand-ins keep the rules of vLLM 0.26 for keys and steps. tests/interop has the real dispatcher.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from peagle.backends.vllm.scheduled_graphs import capture_scheduled_steps
from tests.backends.test_plugin import CONFIG, DISPATCHER, RUNNER, put_module

SIZES = list(range(12, 97, 12))
SCHEDULE = [(1, 2, 5), (3, 4, 2), (5, 8, 1), (9, 99, 0)]


class Mode(Enum):
    NONE, PIECEWISE, FULL, FULL_AND_PIECEWISE = range(4)


class Key(NamedTuple):
    num_tokens: int
    num_reqs: int
    uniform: bool
    loras: int


class Dispatcher:
    def __init__(self, config: Any) -> None:
        self.vllm_config, self.compilation_config = config, config.compilation_config
        self.uniform_decode_query_len = 6
        self.full: set[Key] = set()

    def _compute_bs_to_padded_graph_size(self) -> None:
        self._bs_to_padded_graph_size = [-(-n // 12) * 12 for n in range(SIZES[-1] + 1)]

    def _get_lora_cases(self) -> list[int]:
        return [0, 2]

    def add_cudagraph_key(self, mode: Mode, key: Key) -> None:
        assert mode == Mode.FULL
        self.full.add(key)

    def _create_padded_batch_descriptor(
        self, num_tokens: int, uniform: bool, has_lora: bool, loras: int
    ) -> Key:
        assert has_lora == (loras > 0)
        padded, length = self._bs_to_padded_graph_size[num_tokens], self.uniform_decode_query_len
        if not uniform:
            return Key(padded, padded, False, loras)
        assert padded % length == 0
        most = self.vllm_config.scheduler_config.max_num_seqs
        return Key(padded, min(padded // length, most), True, loras)

    def initialize_cudagraph_keys(self, mode: Mode, length: int = 1) -> None:
        self._compute_bs_to_padded_graph_size()
        if mode == Mode.FULL_AND_PIECEWISE:
            most = length * self.vllm_config.scheduler_config.max_num_seqs
            for size in (size for size in SIZES if size <= most):
                for loras in self._get_lora_cases():
                    key = self._create_padded_batch_descriptor(size, True, loras > 0, loras)
                    self.add_cudagraph_key(Mode.FULL, key)


class Runner:
    def __init__(self, config: Any) -> None:
        self.cudagraph_dispatcher, self.uniform_decode_query_len = Dispatcher(config), 6
        self.seen: list[tuple[int, int]] = []

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        max_num_scheduled_tokens: int,
        force_uniform_decode: bool | None = None,
    ) -> Key | None:
        """The graph of a whole step; None in pieces."""
        if num_tokens == 13:
            raise RuntimeError("out of memory")
        length, uniform = self.uniform_decode_query_len, force_uniform_decode
        if uniform is None:
            uniform = max_num_scheduled_tokens == length and num_tokens == length * num_reqs
        if num_tokens > SIZES[-1]:
            return None
        key = self.cudagraph_dispatcher._create_padded_batch_descriptor(
            num_tokens, uniform, False, 0
        )
        return key if key in self.cudagraph_dispatcher.full else None

    def _warmup_and_capture(self, desc: Key, fails: bool = False) -> None:
        lengths = self.uniform_decode_query_len, self.cudagraph_dispatcher.uniform_decode_query_len
        self.seen.append(lengths)
        if fails:
            raise RuntimeError("out of memory")

    def run(self, *lengths: int) -> Key | None:
        """The graph of a step of so many tokens of each request."""
        return self._determine_batch_execution_and_padding(
            num_tokens=sum(lengths), num_reqs=len(lengths), max_num_scheduled_tokens=max(lengths)
        )


class Config:
    def __init__(self, mode: Mode = Mode.FULL_AND_PIECEWISE, **changed: Any) -> None:
        values = {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 5}
        values |= {"num_speculative_tokens_per_batch_size": SCHEDULE}
        values |= {"is_hybrid": False, "use_mla": False} | changed
        self.speculative_config = self.model_config = SimpleNamespace(**values)
        self.compilation_config = SimpleNamespace(
            cudagraph_mode=mode, cudagraph_capture_sizes=SIZES
        )
        self.scheduler_config = SimpleNamespace(max_num_seqs=30)

    def _maybe_override_dynamic_sd_cudagraph_mode(self) -> None:
        has_schedule = self.speculative_config.num_speculative_tokens_per_batch_size is not None
        if has_schedule and self.compilation_config.cudagraph_mode != Mode.NONE:
            self.compilation_config.cudagraph_mode = Mode.PIECEWISE


REPLACED = (
    (Config, "_maybe_override_dynamic_sd_cudagraph_mode"),
    (Dispatcher, "initialize_cudagraph_keys"),
    (Runner, "_determine_batch_execution_and_padding"),
    (Runner, "_warmup_and_capture"),
)


@pytest.fixture(autouse=True)
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins in vLLM's place, for each test without replaced methods."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    put_module(monkeypatch, CONFIG, CUDAGraphMode=Mode, VllmConfig=Config)
    put_module(monkeypatch, DISPATCHER, CudagraphDispatcher=Dispatcher)
    put_module(monkeypatch, RUNNER, GPUModelRunner=Runner)


def started(*inputs: Any, is_replaced: bool = True, **changed: Any) -> Runner:
    if is_replaced:
        capture_scheduled_steps()
    config = Config(*inputs, **changed)
    config._maybe_override_dynamic_sd_cudagraph_mode()
    runner = Runner(config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(
        config.compilation_config.cudagraph_mode, 6
    )
    return runner


def test_the_graphs_are_those_of_multiples_of_each_step_within_the_most_requests() -> None:
    found = started().cudagraph_dispatcher
    assert found.full == {
        Key(size, size // length, True, loras)
        for length in (1, 2, 3, 6)
        for size in SIZES
        if size % length == 0 and size <= 30 * length
        for loras in (0, 2)
    }
    assert found.uniform_decode_query_len == 6
    schedule = [(1, 8, 9), (9, 9, 4), (10, 30, 7), (31, 99, 1)]  # of 30 requests at most
    uneven = started(num_speculative_tokens_per_batch_size=schedule)
    lengths = {(key.num_tokens, key.num_reqs) for key in uneven.cudagraph_dispatcher.full}
    assert lengths == {(size, size // 6) for size in SIZES} | {(60, 12)}, "K is 5 at most"


def test_only_steps_of_a_schedule_run_whole() -> None:
    runner = started()
    assert runner.run(*[2] * 5) == Key(12, 6, True, 0)
    assert runner.run(*[1] * 24) == Key(24, 24, True, 0)
    assert runner.run(*[6] * 3) == Key(24, 4, True, 0)
    # Another length, mixed lengths, more requests than graphs have, and more tokens.
    for lengths in ([4] * 3, [3, 2, 1], [1] * 30, [3] * 40):
        assert runner.run(*lengths) is None
    # A longer step's graph has as many tokens and requests.
    runner.cudagraph_dispatcher._bs_to_padded_graph_size[20] = 60
    assert runner.run(*[1] * 20) is None


def test_lengths_are_restored_after_each_step_and_after_an_error() -> None:
    runner = started()
    dispatcher = runner.cudagraph_dispatcher
    for key in (Key(24, 12, True, 0), Key(24, 4, True, 0), Key(24, 24, False, 0)):
        runner._warmup_and_capture(key)
    assert runner.seen == [(2, 2), (6, 6), (6, 6)]
    with pytest.raises(RuntimeError, match="out of memory"):
        runner._warmup_and_capture(Key(24, 8, True, 0), fails=True)
    assert runner.seen[-1] == (3, 3)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(*[1] * 13)
    assert (runner.uniform_decode_query_len, dispatcher.uniform_decode_query_len) == (6, 6)


def test_nothing_is_replaced_twice() -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    capture_scheduled_steps()
    once = [getattr(owner, name) for owner, name in REPLACED]
    capture_scheduled_steps()
    assert [getattr(owner, name) for owner, name in REPLACED] == once
    assert not set(once) & set(before)


def test_all_methods_are_replaced_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Dispatcher, "_get_lora_cases")
    before = [getattr(owner, name) for owner, name in REPLACED]
    with pytest.raises(AttributeError, match="_get_lora_cases"):
        capture_scheduled_steps()
    assert [getattr(owner, name) for owner, name in REPLACED] == before


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": Mode.NONE},
        {"mode": Mode.PIECEWISE},
        {"mode": Mode.FULL},
        {"method": "mtp"},
        {"parallel_drafting": False},
        {"num_speculative_tokens_per_batch_size": None},
        {"is_hybrid": True},
        {"use_mla": True},
    ],
    ids=str,
)
def test_other_engines_are_left_as_they_are(changed: dict[str, Any]) -> None:
    steps = [[length] * count for length in (1, 2, 3, 6) for count in (1, 12, 30)]
    without = started(is_replaced=False, **changed)
    before = [without.run(*lengths) for lengths in steps]
    runner = started(**changed)
    assert [runner.run(*lengths) for lengths in steps] == before
    assert runner.cudagraph_dispatcher.full == without.cudagraph_dispatcher.full
    config, other = runner.cudagraph_dispatcher.vllm_config, without.cudagraph_dispatcher
    assert config.compilation_config == other.compilation_config
    runner._warmup_and_capture(Key(24, 12, True, 0))
    assert runner.seen == [(6, 6)]
