#!/usr/bin/env bash
# tools/setup_browser.sh PYTHON...
#
# Finds a Chromium for the tests of web pages: the system's, else Playwright's own, which is fetched
# once for all checkouts of a user (about 100 MB). PYTHON... is the command that runs a Python with
# Playwright, variables before it included.
#
# Exit status 1 where there is neither: the tests of web pages are then skipped, or fail where the
# variable PEAGLE_REQUIRE_BROWSER is set, as in CI.
set -euo pipefail

if [ $# -eq 0 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done
export PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT=${PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT:-5000}
if ! said=$(env "$@" -m playwright install chromium-headless-shell 2>&1); then
    grep -m 1 Error <<<"$said" >&2 || true
    echo "setup: no Chromium is on PATH, and Playwright's cannot be fetched: install the system's" \
        "package chromium, or allow downloads from Playwright's servers" >&2
    exit 1
fi
