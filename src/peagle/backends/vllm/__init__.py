"""vLLM as the engine: found, started, checked, asked.

`installation` finds it, `command` says how it is started, `checks` refuses what is known to fail,
`server` starts it and ends it, `evidence` tells whether it drafts in parallel. The folder `inside`
is on the path of vLLM's own processes, which may live in another environment: `peagle` is this
package there. Modules that vLLM's processes import (`facts`, `serving.vllm_guard`) need the
standard library only.
"""
