"""Every error that Paceline raises on purpose.

    PacelineError
    ├── ConfigError             a value in a config, in SamplingParams or on the command line (also a ValueError)
    │   └── GrammarError            a grammar that cannot be used
    ├── PromptError             a prompt that cannot be run: empty, or beyond the context (also a ValueError)
    ├── ModelError              a model that cannot be had or read
    │   ├── UnknownModelError       no such name, folder or file
    │   ├── DownloadError           the source did not answer, or no disk space was left
    │   ├── ChecksumError           what arrived is not what was expected
    │   ├── CorruptFileError        a weights or tokenizer file that is truncated or malformed
    │   └── UnsupportedModelError   an architecture, tensor type or option that Paceline does not implement
    ├── DraftMismatchError      a drafter that does not fit the target
    ├── PlugInError             a plug-in drafter whose own code failed
    ├── CacheError              a KV budget in which not even one request fits, or more memory than there is
    ├── QueueFullError          more requests wait than may: try again later
    ├── EngineClosedError       an engine that shuts down, or has
    ├── EngineStepError         a step that failed, and with it the requests in it
    └── MissingDependencyError  an optional package that is not installed

Each message is one line: the value, the rule, the remedy. The command line prints it and exits with code 2.
PacelineWarning, through Python's `warnings`, is for what works but is not worth its time.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """A value that breaks a rule of a config, of SamplingParams or of the command line."""


class GrammarError(ConfigError):
    """A grammar that cannot be used: malformed, without any text, or at odds with the model or other parameters."""


class PromptError(PacelineError, ValueError):
    """A prompt that cannot be run."""


class ModelError(PacelineError):
    """A model that cannot be had or read."""


class UnknownModelError(ModelError):
    """No catalog name, folder, file or hub id of that name."""


class DownloadError(ModelError):
    """The source did not answer, or no disk space was left."""


class ChecksumError(ModelError):
    """A file whose SHA-256 is not the expected one."""


class CorruptFileError(ModelError):
    """A weights or tokenizer file that is truncated or malformed."""


class UnsupportedModelError(ModelError):
    """An architecture, tensor type or option that Paceline does not implement."""


class DraftMismatchError(PacelineError):
    """A drafter that does not fit the target: another vocabulary, tokenizer or width."""


class PlugInError(PacelineError):
    """A plug-in drafter whose own code failed; what it raised is the cause."""


class CacheError(PacelineError):
    """A KV budget in which not even one request fits, or more memory than there is."""


class QueueFullError(PacelineError):
    """As many requests wait as may."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds  # an estimate of when there is room, at least 1


class EngineClosedError(PacelineError):
    """The engine takes no more requests: it shuts down, or has."""


class EngineStepError(PacelineError):
    """A step that raised; `__cause__` is what. The requests in it are lost, the others go on."""


class MissingDependencyError(PacelineError):
    """An optional package that is not installed; the message names the extra that brings it."""


class PacelineWarning(UserWarning):
    """A setting that costs more than it brings."""
