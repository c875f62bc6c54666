"""`python -m paceline` and the console script: light, so that Ctrl-C is caught while the commands are imported too."""

import sys


def main() -> None:
    """Runs the command line. Exit codes: 0, 1 (a check failed), 2 (user error), 130 (interrupted)."""
    try:
        from paceline.cli.guard import exit_code
        from paceline.cli.main import app

        sys.exit(exit_code(app))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        exec("")  # where Ctrl-C cut an exec of text short, as dataclasses use it, CPython would still die of SIGINT


if __name__ == "__main__":
    main()
