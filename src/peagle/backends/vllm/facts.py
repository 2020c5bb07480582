"""Names that this process and the guard inside vLLM share, and the facts that the guard reports.

Imports the standard library only: vLLM may live in an environment without peagle's packages.
"""

from typing import Any

GUARD_VARIABLE = "PEAGLE_VLLM_GUARD"
PLUGIN_VARIABLE = "PEAGLE_VLLM"
TESTED_VERSIONS = ((0, 26), (0, 32))
ENGINE_PATH = "/peagle/engine"


def vllm_facts(config: Any) -> dict[str, Any]:
    """Return the resolved settings of a VllmConfig, null where this vLLM does not say."""
    drafting = getattr(config, "speculative_config", None)
    facts: dict[str, Any] = {"has_config": config is not None, "speculative": None}
    if drafting is not None:
        names = ("method", "num_speculative_tokens", "parallel_drafting")
        facts["speculative"] = {name: getattr(drafting, name, None) for name in names}
    facts["model_runner_v2"] = getattr(config, "use_v2_model_runner", None)
    return facts


def dotted(release: tuple[int, int]) -> str:
    """Return a release as it is written, like "0.32"."""
    return ".".join(map(str, release))


TESTED_TEXT = " and ".join(map(dotted, TESTED_VERSIONS))
