"""These tests run where the native engine was built; make package checks that a wheel has it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("paceline._native") else ["*"]
