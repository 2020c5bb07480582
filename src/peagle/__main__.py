"""`python -m peagle`."""

from peagle.cli.main import main

main()
