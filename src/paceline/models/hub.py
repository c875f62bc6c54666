"""Fetches a model folder from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DownloadError, UnknownModelError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch_snapshot(repo_id: str, *, progress: bool) -> Path:
    """The folder of a hub id "owner/name", in the hub's own cache.

    Raises UnknownModelError where the hub has no such model, DownloadError where it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"disable": True}))

    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=tqdm if progress else Silent,
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} is gated: accept its licence on its hub page and log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModelError(f"the hub has no model {repo_id!r}, or it is private: check the id.") from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(f"the hub does not answer and {repo_id} is not cached: check the network.") from error
    except Exception as error:  # the hub's client lets its transport's own errors through
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(f"could not fetch {repo_id} from the hub ({reason[0]}): run again.") from error
    return Path(folder)
