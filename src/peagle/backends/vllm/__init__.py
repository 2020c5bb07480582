"""vLLM as the engine: found, started, checked, asked.

`installation` finds it, `command` says how it is started, `checks` refuses what is known to fail,
`server` starts it and ends it, `evidence` tells whether it drafts in parallel. What runs inside
vLLM's own processes is in the folder `inside` and imports nothing of peagle, because vLLM may live
in an environment of its own.
"""
