"""A hook of mkdocs: pages that lie outside docs/ are part of the site, and links to them lead there.

In the repository a page of docs/ links to `../bench/results/wire.md` or `../CONTRIBUTING.md`, as every viewer of the
repository expects. The site has these files at the places that `moved` gives, and the links are rewritten to fit. Links to
other files of the repository, which are no pages, become plain text: the file's path.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def moved() -> dict[str, str]:
    """Where files of the repository lie in the site, by their path from its root."""
    results = sorted((ROOT / "bench/results").glob("*"))
    places = {f"bench/results/{path.name}": f"results/{path.name}" for path in results if path.suffix in (".md", ".png")}
    places |= {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    pages = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
    return pages | places | {"README.md": "index.md"}


def on_files(files: Any, config: Any) -> Any:
    for source, place in moved().items():
        if not source.startswith("docs/") and source != "README.md":
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    places = moved()
    origin = next((source for source, place in places.items() if place == page.file.src_uri), None)
    if origin is None:  # a page of the site alone
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def relink(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path in places:
            return f"{image}[{text}]({posixpath.relpath(places[path], here or '.')}{anchor})"
        inside = path.startswith("docs/")
        return link[0] if inside or not os.path.exists(ROOT / path) else f"{text} (`{path}`)"

    return _outside_fences(markdown, lambda part: LINK.sub(relink, part))


def _outside_fences(markdown: str, change: Any) -> str:
    """Code is left as it is."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
