"""Pages in a headless Chromium: opened once for many tests, and looked at with axe.

The Chromium is the system's, else Playwright's own (tools/setup_browser.sh fetches it). Where none
starts the tests are skipped, or fail if the variable PEAGLE_REQUIRE_BROWSER is set, as in CI.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Pages:
    """One page for each set of context options: making one takes longer than most tests.

    Args:
        browser: that opens them.
    """

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._made: dict[str, Any] = {}

    def open(self, watch: Callable[[Any], None], options: dict[str, Any]) -> Any:
        """Return the page, with an empty list of `problems` that takes its errors.

        Args:
            watch: gets a page that is new, to have more of its events noted as problems.
            options: of its context.
        """
        key = repr(options)
        if key not in self._made:
            page = self._made[key] = self._browser.new_context(**options).new_page()
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            watch(page)
        self._made[key].problems = []
        return self._made[key]


@contextmanager
def opened_pages() -> Iterator[Pages]:
    """Start a browser for pages, and end it; skip or fail the test where none starts."""
    missing = pytest.fail if os.environ.get("PEAGLE_REQUIRE_BROWSER") else pytest.skip
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("Playwright is not installed; it comes with pip install -e '.[dev]'")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            missing(
                f"no Chromium starts ({str(error).splitlines()[0]}); install the system's package "
                f"chromium, or run tools/setup_browser.sh {sys.executable}"
            )
        yield Pages(browser)
        browser.close()


def grave(page: Any, exclude: Sequence[str] = (), **options: Any) -> list[str]:
    """Return what axe finds that is serious or critical.

    Args:
        exclude: selectors of parts that are left out.
        options: of axe.
    """
    from axe_playwright_python.sync_playwright import Axe

    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    found = page.evaluate(
        "async ([exclude, options]) => (await axe.run({exclude}, options)).violations",
        # Without resultTypes all that is well is described too, in megabytes.
        [list(exclude), {"resultTypes": ["violations"], **options}],
    )
    found = [entry for entry in found if entry["impact"] in ("serious", "critical")]
    return [f"{e['id']}: {[node['html'][:200] for node in e['nodes']][:3]}" for e in found]
