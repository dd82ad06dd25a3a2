"""What a node says of itself; travels there as code, since agentrl may be another there, or missing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from pathlib import Path

Facts = dict[str, str]
"""Versions and sources of what a run needs, and bytes that are free, as words; empty for what is missing."""


def probe(token: str, folder: str) -> Facts:
    """Facts of this node. `token` is the path of a file that the run has made in its `folder`.

    Example: ``{"Python": "3.11.9", "Ray": "2.60.0", "agentrl": "0.1.0 (source 5f0c…)", "token": "8d…", "free": "…"}``.
    """
    return {
        "Python": platform.python_version(),
        "Ray": _version("ray"),
        "agentrl": _program(),
        "token": _text(token),
        "folder": str(_free_bytes(folder)),
        "temporary": str(_free_bytes(tempfile.gettempdir())),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _program() -> str:
    """Version and source: two states of one working copy have the same version."""
    found = importlib.util.find_spec("agentrl")
    version = _version("agentrl")
    if found is None or not found.submodule_search_locations or not version:
        return ""
    folder, digest = Path(found.submodule_search_locations[0]), hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return f"{version} (source {digest.hexdigest()[:12]})"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _free_bytes(folder: str) -> int:
    """Of the disk that has the folder; 0 if there is no such folder."""
    return shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
