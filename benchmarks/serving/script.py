"""What the scripts of this folder do with input that is wrong: one line, and status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from peagle.errors import UserError


def check_positive(args: argparse.Namespace) -> None:
    """Refuse numbers that measure nothing; a seed may be any.

    Raises:
        UserError: a number is not above 0.
    """
    for name, value in vars(args).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "seed" and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected more than 0.")


def run_guarded(main: Callable[[], int]) -> None:
    """Run a script, and end with the status that it returns."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
