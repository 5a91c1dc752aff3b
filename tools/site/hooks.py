"""What mkdocs calls while it builds the site: pages that are made from the package, and links into the repository.

- `reference/*.md` has a page for each package of the public API (see `tools.public_api`).
- CONTRIBUTING.md, CHANGELOG.md and the model cards become pages.
- A link to one of these files, or to a package of the public API (`src/recurra/mixers`), leads to its page. A link to
  any other file of the repository becomes plain text. So the same link works on a forge.
- `<!-- scan: METHOD -->` becomes the figures of a scan, step by step.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.public_api import PACKAGES, public_names
from tools.site.scan_figures import draw, watch

ROOT = Path(__file__).parents[2]
COPIES = {
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "models/memory-horizon.md": ROOT / "src/recurra/pretrained_models/memory-horizon.md",
    "models/books.md": ROOT / "src/recurra/pretrained_models/books.md",
}
PAGE_OF = {source.relative_to(ROOT).as_posix(): page for page, source in COPIES.items()} | {"README.md": "index.md"}
PAGE_OF |= {
    f"src/{package.replace('.', '/')}{end}": f"reference/{package}.md" for package in PACKAGES for end in ("", ".py")
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_SCAN = re.compile(r"^<!-- scan: (\w+) -->$", flags=re.MULTILINE)
TITLES = {
    "hillis_steele": ("distance 1", "distance 2", "distance 4"),
    "blelloch": ("up, pairs", "up, fours", "up, all", "down, halves", "down, pairs", "last: + input"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package}.md", content=reference_page(package)))
    for name, source in COPIES.items():
        files.append(File.generated(config, name, content=_with_links_of_a_page(source, name)))
    return files


def reference_page(package: str) -> str:
    """Write the page of a package: what it is for, and all its public names."""
    module = importlib.import_module(package)
    about = inspect.cleandoc(module.__doc__ or "")
    entries = [_entry(package, name, getattr(module, name)) for name in public_names(package)]
    return "\n\n".join([f"# {package}", about, *entries, ""])


def _entry(package: str, name: str, thing: Any) -> str:
    """Write what the reference has of a name; sources tell it, but for packages and for classes made at run time."""
    if inspect.ismodule(thing):
        return f"## {name}\n\nSee [{package}.{name}]({package}.{name}.md)."
    if inspect.isclass(thing):
        try:
            inspect.getsource(thing)
        except OSError:  # made from a registry
            bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
            return f"## {name}\n\n{inspect.cleandoc(thing.__doc__ or '')}\n\nA class made at run time, from {bases}."
    return f"::: {package}.{name}"


def _with_links_of_a_page(source: Path, name: str) -> str:
    """Read a file outside of docs/, its links made those of a page at `name`."""
    up = "../" * name.count("/")

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if path.startswith("http") or not path:
            return match[0]
        if path.startswith("docs/") and path.endswith(".md"):
            return f"[{text}]({up}{path.removeprefix('docs/')}{hash_sign}{anchor})"
        return f"[{text}]({up}{PAGE_OF[path]})" if path in PAGE_OF else text

    return _LINK.sub(link, source.read_text(encoding="utf-8"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to pages or plain text, and draw scans."""
    here = Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = target.partition("#")[0]
        outside = (Path(config.docs_dir) / here / path).resolve()
        if target.startswith("http") or not path or outside.is_relative_to(config.docs_dir):
            return match[0]
        known = PAGE_OF.get(outside.relative_to(ROOT).as_posix())
        return f"[{text}]({'../' * len(here.parts)}{known})" if known else text

    return _SCAN.sub(lambda match: _steps(match[1]), _LINK.sub(link, markdown))


def _steps(method: str) -> str:
    """Write the figures of a scan as tabs: all of it, and its state after each step."""
    titles = TITLES[method]
    pictures = [("whole", draw(method, titles=titles))]
    pictures += [(str(n), draw(method, n, titles=titles)) for n in range(1, len(watch(method)) + 1)]
    return "\n".join(f'=== "{title}"\n\n    {picture}\n' for title, picture in pictures)
