"""Which steps of a schedule run in one graph, by the dispatcher and runner of real vLLM."""

import json
import os
import subprocess

import pytest

from peagle.backends.vllm.command import MODULE_FOLDER
from peagle.backends.vllm.installation import VllmInstallation

# Graphs of 6 to 48 tokens for 20 requests; steps of so many requests and tokens of each.
CODE = """
import json
from types import SimpleNamespace as Some
from peagle.backends.vllm.plugin import register
register()
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
mode, sizes = CUDAGraphMode.FULL_AND_PIECEWISE, [6, 12, 18, 24, 36, 48]
config = Some(
    speculative_config=Some(method="eagle3", parallel_drafting=True, num_speculative_tokens=5,
        num_speculative_tokens_per_batch_size=[(1, 4, 5), (5, 9, 1), (10, 20, 0)]),
    compilation_config=Some(cudagraph_mode=mode, mode=3, cudagraph_capture_sizes=sizes,
        splitting_ops=[], compile_sizes=[], max_cudagraph_capture_size=48,
        is_attention_compiled_piecewise=lambda: True),
    model_config=Some(is_hybrid=False, use_mla=False, is_encoder_decoder=False),
    num_speculative_tokens=5, lora_config=None, scheduler_config=Some(max_num_seqs=20),
    parallel_config=Some(data_parallel_size=1), observability_config=Some(cudagraph_metrics=False),
)
runner = Some(vllm_config=config, model_config=config.model_config, uniform_decode_query_len=6,
    cudagraph_dispatcher=CudagraphDispatcher(config), _is_uniform_decode=Runner._is_uniform_decode,
    input_batch=Some(lora_id_to_lora_request={}))
runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 6)
for num_reqs, length in [(3, 6), (7, 2), (9, 2), (12, 1), (17, 1), (19, 1), (5, 3)]:
    found = Runner._determine_batch_execution_and_padding(runner, num_tokens=num_reqs * length,
        num_reqs=num_reqs, num_scheduled_tokens_np=None, max_num_scheduled_tokens=length)
    print(json.dumps([found[0].name, found[1].num_tokens, found[1].num_reqs]))
"""


@pytest.mark.vllm
def test_steps_of_a_schedule_run_whole_in_vllm(installation: VllmInstallation) -> None:
    variables = os.environ | {"PYTHONPATH": str(MODULE_FOLDER), "PEAGLE_VLLM": "1"}
    done = subprocess.run(
        [str(installation.python), "-c", CODE], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '["'] == [
        ["FULL", 18, 3],
        ["FULL", 18, 9],
        ["FULL", 18, 9],
        ["FULL", 12, 12],
        ["FULL", 18, 18],
        ["PIECEWISE", 24, None],  # more requests than the engine takes
        ["PIECEWISE", 18, None],  # not of the schedule
    ]
