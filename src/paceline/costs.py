"""What the passes of a model cost on this machine: measured at its first load, then read from the cache folder."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.config import EngineConfig, usable_cores
from paceline.control.cost import PassCosts, measure
from paceline.errors import CorruptFileError
from paceline.interfaces import Runner
from paceline.machine import cpu_fields
from paceline.models.catalog import cache_folder
from paceline.models.json_file import read_json, write_json
from paceline.models.tuned_layers import fingerprint

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel

_MAX_ROWS = 32
_METHOD = 2  # counts up when costs are measured in another way


def of(model: LoadedModel, config: EngineConfig, runner: Runner) -> PassCosts:
    """Costs of a model under a resolved config, whose runner's K/V pool is free. Where they are not known it takes less
    than two seconds, of a large model a few more."""
    path = _path(model, config)
    with suppress(CorruptFileError, OSError, ValueError):  # measured again, and written over
        if (value := read_json(path)) is not None:
            return PassCosts.from_json(value)
    found = measure(runner, max_rows=min(_MAX_ROWS, config.scheduler.max_num_batched_tokens))
    with suppress(OSError):  # a folder that cannot be written to costs seconds at each start
        write_json(path, found.as_json())
    return found


def _path(model: LoadedModel, config: EngineConfig) -> Path:
    """One file for each machine, version, model and way to run it."""
    settings = asdict(config)
    settings.pop("speculation")
    settings["cache"].pop("kv_cache_memory")
    settings["scheduler"].pop("max_num_seqs")
    cpu = cpu_fields()
    names = [value for name, value in cpu.items() if name.startswith(("vendor_id", "model", "flags"))]
    machine = [names or platform.processor(), platform.machine(), usable_cores(), paceline.__version__, _METHOD]
    key = json.dumps([machine, fingerprint(model.path), settings], sort_keys=True)
    return cache_folder() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
