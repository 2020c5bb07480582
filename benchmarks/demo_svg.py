"""Draw the end of the demo, the last text and the table: `python benchmarks/demo_svg.py FILE.svg`.

Further arguments go to `peagle demo`.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI

from peagle.cli import demo
from peagle.cli.main import run

WIDTH = 92
SPARED = re.compile(
    r"@font-face \{.*?\}\s*|<clipPath id=\"t-line-\d+\">.*?</clipPath>"
    r"| clip-path=\"url\(#t-line-\d+\)\"",
    re.DOTALL,
)


class PictureView(demo.LiveView):
    """Keeps the last text and shows no frames on the way."""

    def loading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.console.print(self._panel(self._output))

    def _frame(self, *, force: bool) -> None:
        pass


def main() -> int:
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".svg"):
        print("usage: python benchmarks/demo_svg.py FILE.svg [OPTIONS OF peagle demo]")
        return 2
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, width=WIDTH, highlight=False
    )
    demo.make_console = lambda no_color: console
    demo.make_view = lambda console, output_format: PictureView(console)
    status = run(["demo", *sys.argv[2:]])
    if status == 0:
        picture = console.export_svg(title="peagle demo", theme=MONOKAI, unique_id="t")
        # Without fonts that rich would fetch from elsewhere, clips of lines and indentation.
        Path(sys.argv[1]).write_text(re.sub(r"\s*\n\s*", "\n", SPARED.sub("", picture)))
    return status


sys.exit(main())
