"""The pair and the prompts that ship inside the package."""

from pathlib import Path

_ROOT = Path(__file__).parent
BUNDLED_TARGET = _ROOT / "target"
BUNDLED_PEAGLE = _ROOT / "peagle"
BUNDLED_EAGLE3 = _ROOT / "eagle3"
BUNDLED_PROMPTS = _ROOT / "prompts"
