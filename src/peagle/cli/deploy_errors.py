"""What stayed after a failed deployment, for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from peagle.cli.options import OutputFormat


@contextmanager
def leftovers_told(output_format: OutputFormat) -> Iterator[None]:
    """Within, an error that leaves something behind is also printed as JSON, if that was asked for.

    One object on standard output: error, and stayed, a list of what, command and reason.
    """
    from peagle.deploy.apply import Unfinished

    try:
        yield
    except Unfinished as error:
        if output_format is OutputFormat.JSON:
            print(json.dumps(error.to_json(), indent=2))
        raise
