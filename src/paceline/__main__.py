"""`python -m paceline`: the command line of the Python at hand."""

from paceline.cli.main import main

main()
