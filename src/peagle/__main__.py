"""`python -m peagle` is the `peagle` command."""

from peagle.cli.main import main

main()
