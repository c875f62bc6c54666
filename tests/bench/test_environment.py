"""What is said of the machine names neither host nor user nor folder."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

from paceline.bench.environment import describe_environment


def test_names_the_machine_but_nobody():
    environment = describe_environment()
    text = json.dumps(environment)
    assert environment["cpu"]
    assert environment["cores"] >= 1
    assert environment["versions"]["paceline"]
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert getpass.getuser() not in environment["cpu"].split()
