"""Hooks of MkDocs (mkdocs.yml): pages from outside docs/, links that leave docs/, and the version in the header."""

import os
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "SUPPORT.md": "support.md",
    "helm/tidemark/README.md": "reference/chart.md",
}
"""Pages of the repository outside docs/, with their paths on the site."""

_WORKER = "javascripts/file-worker.js"
_FOREIGN = "https://unpkg.com/iframe-worker/shim"
_SOURCES = {page: path for path, page in OUTSIDE.items()}
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_NAME = re.compile(r"<code>[\w/.:#&;-]{16,}</code>")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version in the header."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"Tidemark {project['version']}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Title the page by its heading, and point links to files outside docs/ at their pages.

    A link to any other file of the repository becomes text.
    """
    if heading := re.match(r"(?:<!--.*?-->\s*)?# (.+)", markdown, re.DOTALL):
        page.meta["title"] = (
            heading[1].partition("\n")[0].replace("`", "")
        )  # the short names of the navigation say less
    site_path = page.file.src_uri
    source = ROOT / _SOURCES.get(site_path, f"docs/{site_path}")
    return _LINK.sub(lambda link: _resolved(link, source.parent, site_path), markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the worker for file:// from the site, where the theme's offline plugin would load one from another host.

    Long names in tables, of settings, metrics and tests, may break after an underscore or a slash, so that tables fit.
    """
    output = _CELL.sub(lambda cell: _NAME.sub(_breakable, cell[0]), output)
    return output.replace(_FOREIGN, os.path.relpath(_WORKER, Path(page.file.dest_uri).parent))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page of an address that is not there."""
    return output.replace(_FOREIGN, f"/{_WORKER}")


def _breakable(name: re.Match[str]) -> str:
    return (
        "<code>"
        + re.sub(r"([_/]|::|\.(?!py\b))", r"\1<wbr>", name[0].removeprefix("<code>").removesuffix("</code>"))
        + "</code>"
    )


def _resolved(link: re.Match[str], folder: Path, site_path: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if re.match(r"[a-z]+:", target):
        return link[0]
    path = os.path.relpath(folder / target, ROOT)
    goal = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if goal is None:
        return text if (ROOT / path).exists() else link[0]
    return f"[{text}]({os.path.relpath(goal, Path(site_path).parent)}{anchor})"
