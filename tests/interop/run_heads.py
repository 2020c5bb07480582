"""Runs heads in vLLM, one after the other in one process; vLLM's Python runs this file.

    python run_heads.py JOB RESULTS

JOB is JSON: {"prompts": [[token ids]], "max_tokens", "k", "together", "heads": {name: arguments of
LLM}}. RESULTS gets a line of JSON for each head as it is finished: {"name", "seconds", "outputs":
[[token ids]], "counts": [[drafts, accepted at position 1, ...]]}, both by prompt, or {"name",
"seconds", "error"}. Prompts that run together have one line of counts.
"""

import gc
import json
import sys
import time
import traceback
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PREFIX = "vllm:spec_decode_num_"


def counters(llm: LLM, k: int) -> list[int]:
    """Drafts, and those accepted up to each position, since the start."""
    told = {metric.name: metric for metric in llm.get_metrics()}
    drafts = told.get(f"{PREFIX}drafts")
    per_pos = told.get(f"{PREFIX}accepted_tokens_per_pos")
    if drafts is None or per_pos is None:
        return [0] * (k + 1)
    return [drafts.value, *per_pos.values]


def run(job: dict, arguments: dict) -> dict:
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs, counts, before = [], [], counters(llm, job["k"])
    # One at a time, so that counters are each one's, or all together.
    groups = [job["prompts"]] if job["together"] else [[one] for one in job["prompts"]]
    for group in groups:
        prompts = [{"prompt_token_ids": prompt} for prompt in group]
        for output in llm.generate(prompts, params, use_tqdm=False):
            outputs.append(list(output.outputs[0].token_ids))
        after = counters(llm, job["k"])
        counts.append([now - then for now, then in zip(after, before, strict=True)])
        before = after
    return {"outputs": outputs, "counts": counts}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "w") as results:
        for name, arguments in job["heads"].items():
            begun = time.monotonic()
            try:
                told = run(job, arguments)
            except Exception:
                told = {"error": traceback.format_exc()}
            line = {"name": name, "seconds": time.monotonic() - begun, **told}
            print(json.dumps(line), file=results, flush=True)
            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
