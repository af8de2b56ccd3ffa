"""A hook of mkdocs: pages that lie outside docs/ are part of the site, and links to them lead there.

In the repository a page of docs/ links to `../bench/results/wire.md` or `../CONTRIBUTING.md`, as every viewer of the
repository expects. The site has these files at the places that `moved` gives, and links are rewritten to fit. A link to
a file that is no page becomes plain text, the file's path. Results that mkdocs.yml does not list come last.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def moved() -> dict[str, str]:
    """Where files of the repository lie in the site, by their path from its root."""
    pages = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
    results = [path.name for path in sorted((ROOT / "bench/results").glob("*")) if path.suffix in (".md", ".png")]
    places = {f"bench/results/{name}": f"results/{name}" for name in results}
    others = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
    return pages | places | others


def on_config(config: Any) -> Any:
    (figures,) = (section["Figures"] for section in config.nav if "Figures" in section)
    pages = [place for place in moved().values() if place.startswith("results/") and place.endswith(".md")]
    figures += [page for page in pages if page not in figures]
    return config


def on_files(files: Any, config: Any) -> Any:
    for source, place in moved().items():
        if not files.get_file_from_path(place):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    places = moved()
    place = page.file.src_uri
    origin = next((source for source, found in places.items() if found == place), f"docs/{place}")

    def relink(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if "://" in target or not (ROOT / path).exists():  # mkdocs says what is wrong with it
            return link[0]
        if path in places:
            return f"{image}[{text}]({posixpath.relpath(places[path], posixpath.dirname(place) or '.')}{anchor})"
        return link[0] if path.startswith("docs/") else f"{text} (`{path}`)"

    return _outside_fences(markdown, lambda part: LINK.sub(relink, part))


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Code is left as it is."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
