"""Hooks of mkdocs: brings the pages and examples that lie outside docs/ into the site.

The root's pages (ARCHITECTURE.md and others) become pages of the site; files that a page links to, such as examples,
are copied.  Links are rewritten to where the files lie in the site, so a link that leads nowhere fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
UP = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link from a page in docs/ to a file of the root."""
DOWN = re.compile(r"\]\(docs/([^)\s]+)")
"""A link from a page of the root to one in docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and every file outside docs/ that a page links to."""
    root = Path(config.config_file_path).parent
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(root / name).read_text(encoding="utf-8")))
    linked = {
        target
        for file in files.documentation_pages()
        for target in UP.findall(file.content_string)
        if target not in ROOT_PAGES and (root / target).is_file()
    }
    for target in sorted(linked):
        files.append(File.generated(config, site_name(target), content=(root / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite the links between docs/ and the root."""
    markdown = UP.sub(lambda link: f"]({link[1] if link[1] in ROOT_PAGES else site_name(link[1])}", markdown)
    return DOWN.sub(lambda link: f"]({link[1]}", markdown)


def site_name(target: str) -> str:
    """Where a file of the root lies in the site, as text that a browser shows."""
    return f"files/{target}.txt"
