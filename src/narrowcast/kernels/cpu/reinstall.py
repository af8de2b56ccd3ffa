"""How the native core is built once more, for installations that lack it."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from urllib.request import url2pathname


def reinstall_command() -> str:
    """The command that builds the core: pip notes where an installation came from, and keeps what it has built."""
    command = "pip install --force-reinstall --no-deps --no-cache-dir"
    try:
        origin = json.loads(metadata.distribution("narrowcast").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    url, editable = origin.get("url", ""), origin.get("dir_info", {}).get("editable")
    if url.startswith("file://"):
        return f"{command} {'--editable ' if editable else ''}{shlex.quote(url2pathname(url.removeprefix('file://')))}"
    kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"{command} {shlex.quote(kind + url)}" if url else f"{command} --no-binary narrowcast narrowcast"
