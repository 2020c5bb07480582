"""Pages in a browser: opened once for many tests, and looked at with axe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


class Pages:
    """One page for each set of context options: making one takes longer than most tests.

    Args:
        browser: that opens them.
    """

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._made: dict[str, Any] = {}

    def open(self, watch: Callable[[Any], None], options: dict[str, Any]) -> Any:
        """The page, with an empty list of `problems` that takes its errors.

        Args:
            watch: told of a page that is new, to have more of its events noted as problems.
            options: of its context.
        """
        key = repr(options)
        if key not in self._made:
            page = self._made[key] = self._browser.new_context(**options).new_page()
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            watch(page)
        self._made[key].problems = []
        return self._made[key]

    def close(self) -> None:
        """Close all of them."""
        for page in self._made.values():
            page.context.close()


def grave(page: Any, exclude: Sequence[str] = (), **options: Any) -> list[str]:
    """What axe finds that is serious or critical.

    Args:
        page: that is open.
        exclude: selectors of what is left out.
        options: of axe.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe.axe_script)
    found = page.evaluate(
        "async ([exclude, options]) => (await axe.run({exclude}, options)).violations",
        # Without resultTypes all that is well is described too, in megabytes.
        [list(exclude), {"resultTypes": ["violations"], **options}],
    )
    found = [entry for entry in found if entry["impact"] in ("serious", "critical")]
    return [f"{e['id']}: {[node['html'][:200] for node in e['nodes']][:3]}" for e in found]
