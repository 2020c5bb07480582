"""vLLM as the engine.

`installation` finds it, `launch` describes a launch, `command` makes the command line, `checks`
refuses known faults, `server` starts and ends it, `evidence` shows whether it drafts in parallel.
The folder `inside` is on the path of vLLM's own processes, which may live in another environment:
`peagle` is this package there, and vLLM finds `plugin`. Modules that vLLM's processes import
(`facts`, `plugin`, `serving.vllm_guard`) need the standard library only; `corrected_drafts`, which
the plugin loads where it is turned on, needs what vLLM has too.
"""
