"""What a command says of warnings: ours in one line, others as Python shows them."""

from __future__ import annotations

import warnings

from paceline.cli.guard import exit_code
from paceline.errors import PacelineWarning


def test_our_warnings_are_one_line_on_stderr(capsys) -> None:
    def command() -> int:
        warnings.warn("slow,\nso drop it.", PacelineWarning, stacklevel=1)
        return 0

    assert exit_code(command) == 0
    assert capsys.readouterr() == ("", "warning: slow, so drop it.\n")


def test_other_warnings_are_shown_as_always(capsys) -> None:
    def command() -> int:
        warnings.warn("somebody else's", UserWarning, stacklevel=1)
        return 0

    with warnings.catch_warnings():
        warnings.showwarning = lambda *args, **_: print(args[0])
        assert exit_code(command) == 0
    assert capsys.readouterr().out == "somebody else's\n"
