"""Hooks of mkdocs: brings the pages and examples that lie outside docs/ into the site.

The pages of the root (ARCHITECTURE.md and others) become pages of the site.  Other linked files, such as examples,
are copied as text.  Links are rewritten accordingly, so a link that leads nowhere fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
"""Label, target and anchor of a link; pictures are no links."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and every file outside docs/ that a page links to."""
    root = Path(config.config_file_path).parent
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for name in ROOT_PAGES:
        texts[name] = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=texts[name]))
    linked = {in_repository(page, link[2]) for page, text in texts.items() for link in LINK.finditer(text)}
    for target in sorted(linked):
        if not target.startswith(("docs/", "..")) and target not in ROOT_PAGES and (root / target).is_file():
            files.append(File.generated(config, site_name(target), content=(root / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite the links that cross the border of docs/."""
    name = page.file.src_uri if page.file.src_uri in ROOT_PAGES else f"docs/{page.file.src_uri}"
    root = Path(config.config_file_path).parent

    def rewritten(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target, anchor = in_repository(name, link[2]), link[3] or ""
        if target.startswith("docs/"):
            return f"[{link[1]}]({target.removeprefix('docs/')}{anchor})"
        if target == "README.md":
            return f"[{link[1]}](index.md{anchor})"
        if (root / target).is_dir():
            return link[1]
        return f"[{link[1]}]({target if target in ROOT_PAGES else site_name(target)}{anchor})"

    return LINK.sub(rewritten, markdown)


def in_repository(page: str, target: str) -> str:
    """The path of a link's target from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_name(target: str) -> str:
    """Where a file of the root lies in the site, as text that a browser shows."""
    return f"files/{target}.txt"
