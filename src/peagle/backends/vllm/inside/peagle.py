"""Makes peagle importable inside vLLM's processes, whose environment may lack it.

PYTHONPATH names this folder, so that `import peagle` runs this file, which puts the real package,
from the folder in which this file lies, in its own place. No other package of peagle's environment
becomes importable that way, and an older peagle in vLLM's environment is not taken.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[3]
_spec = spec_from_file_location(
    "peagle", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
)
assert _spec is not None and _spec.loader is not None
sys.modules["peagle"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["peagle"])
