"""Pages: one head and one style for everything that is written as HTML, and tables of text.

A page is one file that fetches and runs nothing: its policy makes a browser refuse whatever it could.
"""

import html
from collections.abc import Sequence

POLICY = (
    '<meta http-equiv="Content-Security-Policy"\n'
    "  content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
)
STYLE = """
body { margin: 0 auto; max-width: 80rem; padding: 1rem 2rem; color: #222; background: #fff;
  font: 15px/1.45 system-ui, sans-serif; }
a { color: #0b5394; }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; }
th, td { border: 1px solid #d5d9dd; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #eef1f4; }
"""


def head(style: str, title: str = "") -> str:
    """What a page's `<head>` holds: encoding, policy, title (none where it is empty) and the style.

    Args:
        style: Rules beyond those that all pages share.
        title: Plain text.
    """
    named = f"<title>{html.escape(title)}</title>\n" if title else ""
    return f'\n<meta charset="UTF-8">\n{POLICY}\n{named}<style>{STYLE}{style}</style>\n'


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """An HTML table of cells that are HTML already.

    Args:
        header: Names of the columns.
        rows: Cells.
        caption: What the table is, as HTML; none where it is empty.
    """
    named = f"<caption>{caption}</caption>" if caption else ""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{named}<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
