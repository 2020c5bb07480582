"""vLLM as the engine: found, started, checked, asked.

`installation` finds it, `command` says how it is started, `checks` refuses what is known to fail,
`server` starts it and ends it, `evidence` tells whether it drafts in parallel, `offline` runs it
without HTTP. The folder `inside` is on the path of vLLM's own processes, which may live in another
environment: `peagle_vllm_worker` runs there, and `peagle` is this package. What is imported of it
there (`facts`, `serving.vllm_guard`) needs the standard library only.
"""
