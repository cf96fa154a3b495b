"""Finds a command's config.json: a file, a folder with one, or a model id of Hugging Face.

A local file is used without network access. A model id that is not on this machine is requested once, for at most
`HUB_S` seconds. Without this limit the hub's package retries for long without a network, and a name lookup can hang.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, Final

from quire.errors import UsageError

HUB_S: Final = 1.5  # timeout of a request to the hub, so that the command answers within 3 s


def config_path(model: str) -> Path:
    """Returns the argument's config.json. A model id is downloaded.

    Raises:
        UsageError: the file does not exist, or cannot be fetched.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"no config.json in {model}")
        return path / "config.json"
    if path.is_file():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(f"no file or folder {model}")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        reason = "to use it as a model id of Hugging Face, pip install huggingface_hub"
        raise UsageError(f"no file or folder {model}; {reason}") from None
    cached = hub.try_to_load_from_cache(model, "config.json")  # Unlike `hf_hub_download`, this reads only the disk.
    if isinstance(cached, str):
        return Path(cached)
    if hub.constants.HF_HUB_OFFLINE:
        raise UsageError(
            f"no file or folder {model}, and the cache of Hugging Face has no model of that id (HF_HUB_OFFLINE "
            "forbids a download); give a config.json or a folder"
        )
    return _fetched(hub, model)


def _fetched(hub: Any, model: str) -> Path:
    """Fetches the file from the hub, on a thread that is abandoned if it takes too long.

    Raises:
        UsageError: the hub does not have the file, or does not answer in time.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # This function itself reports failures.
    found: list[Path] = []
    failed: list[Exception] = []

    def fetch() -> None:
        try:
            found.append(Path(hub.hf_hub_download(repo_id=model, filename="config.json", etag_timeout=HUB_S)))
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(target=fetch, name="hub", daemon=True)
    asking.start()
    asking.join(HUB_S)
    if found:
        return found[0]
    nothing = f"no file or folder {model}, and Hugging Face has no config.json of a model with that id"
    if not failed:
        raise UsageError(f"{nothing}: Hugging Face does not answer within {HUB_S:g} s; give a config.json or a folder")
    reason = next(iter(str(failed[0]).strip().splitlines()), type(failed[0]).__name__)
    raise UsageError(f"{nothing}: {reason}")


def read_config(path: Path) -> dict[str, Any]:
    """Returns the parsed file.

    Raises:
        UsageError: the file cannot be read, or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not a JSON object")
    return config
