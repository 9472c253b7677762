"""
Sphinx settings of the documentation's site: scripts/docs.sh. Its source directory is the root of the checkout, so that
links between README, CONTRIBUTING and docs lead to pages. The Markdown files stay readable by themselves.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ding_store import __version__  # noqa: E402

project = 'ding_store'
release = version = __version__
author = copyright = 'the ding_store contributors'
root_doc = 'README'
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinxcontrib.mermaid']
include_patterns = ['README*.md', 'CONTRIBUTING.md', 'SECURITY.md', 'CHANGELOG.md', 'docs/**.md']
exclude_patterns = [
    '.*',
    'benchmarks',
    'build',
    'ding_store',
    'dizoo_configs',
    'requirements',
    'scripts',
    'tests',
    'site',
]
html_theme = 'furo'
highlight_language = 'none'  # of blocks that name no language, such as output
html_title = f'ding_store {version}'
myst_heading_anchors = 4
myst_fence_as_directive = ['mermaid']
mermaid_height, mermaid_fullscreen = 'auto', False
autodoc_member_order = 'bysource'

#: The page whose tables list all pages, in the order of the sidebar.
INDEX = ROOT / 'docs' / 'README.md'
#: Pages that come first in a folder -> the sidebar has the folder's other pages below them.
FIRST = ('docs/design/README', 'docs/pipelines/README', 'docs/results/summary', 'docs/reference/api/README')


def setup(app):
    app.connect('source-read', add_sidebar)
    app.connect('autodoc-process-docstring', to_fields)


def toctree(pages, caption=''):
    options = [':hidden:', *([f':caption: {caption}'] if caption else [])]
    return '\n'.join(['', '', '```{toctree}', *options, '', *pages, '```', ''])


def add_sidebar(app, docname, source):
    """Append the pages that come below a page in the sidebar."""
    if docname == root_doc:
        parts = re.split(r'^## (.+)$', INDEX.read_text(encoding='utf-8'), flags=re.M)
        for caption, section in zip(parts[1::2], parts[2::2]):
            links = re.findall(r'^\| \[[^\]]+\]\(([^)#]+)\.md\)', section, re.M)
            pages = [str((INDEX.parent / link).resolve().relative_to(ROOT)) for link in links]
            listed = {Path(first).parent for first in FIRST if first in pages}
            inner = [page for page in pages if page in FIRST or Path(page).parent not in listed]
            source[0] += toctree([f'/{page}' for page in inner], caption)
        source[0] += toctree(['/docs/README', '中文 </README.zh-CN>', '/CHANGELOG'], 'More')
    if docname in FIRST:
        folder = Path(docname).parent
        siblings = sorted(page for page in app.env.found_docs if Path(page).parent == folder and page != docname)
        source[0] += toctree([f'/{page}' for page in siblings])


#: Heading in a docstring of DI-engine's style -> the field of Sphinx for its items.
FIELDS = {'Arguments': 'param', 'Returns': 'returns', 'Raises': 'raises'}
HEADING = re.compile(r'([A-Z]\w*)[\w (),]*:')
TYPE = re.compile(r' \(:obj:`[^`]*`\)')  # signatures have the types
ITEM = re.compile(r'- (?P<names>[\w ,`.*]+): (?P<text>.*)')


def to_fields(app, what, name, obj, options, lines):
    """Turn the headings of a docstring, such as ``Arguments:``, into fields of Sphinx. ``Overview:`` is left out."""
    result, heading = [''], None
    for line in lines:
        if line and not line.startswith(' '):
            title = HEADING.fullmatch(line)
            heading = title and title[1]
            if title:  # a blank line ends the text before, and begins a list
                result += ['', *([] if heading in FIELDS or heading == 'Overview' else [f'**{line[:-1]}**', ''])]
                continue
        text = line[4:] if heading else line
        item = ITEM.fullmatch(TYPE.sub('', text)) if heading in FIELDS else None
        if item and heading == 'Returns':
            result.append(f':returns: {item["text"]}')
        elif item:
            *others, last = (each.strip('` ') for each in item['names'].split(','))
            result += [f':{FIELDS[heading]} {each}: See {last}.' for each in others]
            result.append(f':{FIELDS[heading]} {last}: {item["text"]}')
        else:
            is_text_after_fields = heading in FIELDS and text and not text.startswith(' ')
            result += ['', text] if is_text_after_fields and result[-1] else [text]
    lines[:] = result
