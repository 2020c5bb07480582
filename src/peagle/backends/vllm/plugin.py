# pyright: reportMissingImports=false
"""peagle as a plugin of vLLM: with PEAGLE_VLLM=1 a P-EAGLE head drafts there with its correction,
and as many tokens as a schedule of K asks for.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Without the
variable nothing is imported and nothing changes.
"""

import logging
import os

from peagle.backends.vllm.facts import PLUGIN_VARIABLE, TESTED_TEXT, TESTED_VERSIONS, dotted


def register() -> None:
    """Let vLLM's proposer correct and shorten the drafts of P-EAGLE heads, if PEAGLE_VLLM is 1.

    Another vLLM than the tested ones, or one whose proposer cannot be replaced, serves as without
    the plugin, and one line says so. One that captures no whole steps of a schedule, or no walks,
    loses those alone, with one line each. Raises nothing.
    """
    logger, value = logging.getLogger("vllm.peagle"), os.environ.get(PLUGIN_VARIABLE, "")
    if value != "1":
        if value not in ("", "0"):
            logger.warning("PEAGLE_VLLM is %r; expected 1: vLLM drafts without peagle.", value)
        return
    try:
        from vllm.version import __version_tuple__ as version

        if (release := tuple(version[:2])) not in TESTED_VERSIONS:
            raise RuntimeError(f"it knows vLLM {TESTED_TEXT}, and this is {dotted(release)}")
        from peagle.backends.vllm.corrected_drafts import install
        from peagle.backends.vllm.shorter_drafts import follow_schedules

        install()
        follow_schedules()
    except Exception as error:
        logger.warning("peagle steps aside: %s. vLLM drafts without corrections.", error)
        return
    try:
        from peagle.backends.vllm.scheduled_graphs import capture_scheduled_steps

        capture_scheduled_steps()
    except Exception as error:
        logger.warning("peagle leaves the steps of a schedule of K in pieces: %s.", error)
    try:
        from peagle.backends.vllm.walk_graphs import capture_walks

        capture_walks()
    except Exception as error:
        logger.warning("peagle launches the kernels of corrections one by one: %s.", error)
