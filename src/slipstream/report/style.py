"""The style sheet and the HTML skeleton for all pages."""

from __future__ import annotations

from html import escape

__all__ = ["document", "section", "svg_document", "table"]

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--card:#f6f7f9;--ink:#1c2127;--soft:#5b6570;--rule:#d9dee4;--good:#0b6b3a;
--warn:#8a4b00;--bad:#a8201a;--bar:#2a6fb0;--cell:42,111,176;
--c0:#1f5fa8;--c1:#b5480c;--c2:#1a7f5a;--c3:#8b3a8f;--c4:#77650a;--c5:#c0265e;--c6:#4a5a6a;--c7:#0a7f8f}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--card:#1d232a;--ink:#e6eaee;--soft:#a2adb8;--rule:#38414b;
--good:#6fd39b;--warn:#f0b45c;--bad:#ff8f87;--bar:#5a9fe0;--cell:90,159,224;
--c0:#74b3f5;--c1:#f5a066;--c2:#66d1a6;--c3:#d79be0;--c4:#d9c65a;--c5:#ff8fb5;--c6:#a9b7c5;--c7:#62cfdd}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 28px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 10px;padding-bottom:4px;border-bottom:1px solid var(--rule)}
h3{font-size:14px;margin:0 0 4px;overflow-wrap:anywhere}
p{margin:6px 0}
.soft,.note{color:var(--soft)}
.note{font-size:13.5px;max-width:88ch}
.badge{display:inline-block;border:1.5px solid currentColor;border-radius:99px;padding:0 10px;font-size:13px;
font-weight:600}
.finished{color:var(--good)}.interrupted,.incomplete{color:var(--warn)}.failed{color:var(--bad)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0 0;padding:0;list-style:none}
.tiles li{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 14px;min-width:128px}
.tiles span{display:block;font-size:13px;color:var(--soft)}
.tiles b{font-size:20px;font-variant-numeric:tabular-nums}
.tiles small{display:block;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;min-width:0}
figure svg:not(.key){width:100%;height:auto;display:block}
svg .axis{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--rule);stroke-width:1}svg .tick,svg .frame{stroke:var(--soft);stroke-width:1}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .band{stroke:none;opacity:.18}
svg .bad{stroke:var(--bad);stroke-width:2;fill:none}
.line.s0,.dot.s0{stroke:var(--c0)}.line.s1,.dot.s1{stroke:var(--c1);stroke-dasharray:7 3}
.line.s2,.dot.s2{stroke:var(--c2);stroke-dasharray:2 3}.line.s3,.dot.s3{stroke:var(--c3);stroke-dasharray:9 3 2 3}
.line.s4,.dot.s4{stroke:var(--c4);stroke-dasharray:12 4}.line.s5,.dot.s5{stroke:var(--c5);stroke-dasharray:4 2}
.line.s6,.dot.s6{stroke:var(--c6);stroke-dasharray:1 4}.line.s7,.dot.s7{stroke:var(--c7);stroke-dasharray:9 3 2 3 2 3}
.band.s0{fill:var(--c0)}.band.s1{fill:var(--c1)}.band.s2{fill:var(--c2)}.band.s3{fill:var(--c3)}
.band.s4{fill:var(--c4)}.band.s5{fill:var(--c5)}.band.s6{fill:var(--c6)}.band.s7{fill:var(--c7)}
svg .dot.dot{fill:var(--bg);stroke-width:1.4;stroke-dasharray:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:4px 0 0;padding:0;list-style:none;font-size:13px}
.legend li{overflow-wrap:anywhere}
.key{width:34px;height:10px;margin-right:6px;vertical-align:middle}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);overflow-wrap:anywhere}
th{font-weight:600;color:var(--soft)}
td.num,th.num{text-align:right;min-width:5.5em}
td.num{white-space:nowrap}th.num{overflow-wrap:normal}
td:first-child,th:first-child{min-width:9em}
td.wide{min-width:180px;width:42%}
.bar{display:block;height:12px;margin-top:5px;background:var(--bar);border-radius:2px;min-width:1px}
.matrix td,.matrix th{padding:3px 6px;text-align:right;border:1px solid var(--rule);white-space:nowrap;min-width:0}
.matrix th:first-child{white-space:normal;min-width:6em}
.matrix td.hit{font-weight:700;outline:2px solid var(--soft);outline-offset:-2px}
.advice li{margin:6px 0;max-width:92ch}
.message{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;
font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
.error{border-left:4px solid var(--bad);padding:4px 12px;background:var(--card)}
img{max-width:100%;height:auto;border:1px solid var(--rule);border-radius:8px}
.examples{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:12px;margin:0;padding:0;
list-style:none}
.examples li{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px;overflow-wrap:anywhere}
.examples img{width:100%;height:112px;object-fit:contain;border:0;border-radius:0;image-rendering:pixelated;
display:block;margin-bottom:4px}
.examples b,.examples small{display:block}.examples small{color:var(--soft)}
.examples .wrong b{color:var(--bad)}.examples .correct b{color:var(--good)}
details{margin-top:8px}summary{cursor:pointer;color:var(--soft)}
@media(max-width:600px){body{padding:14px 12px 40px}td,th{padding:4px 6px}td.wide{min-width:70px}
.tiles li{flex:1 1 40%;min-width:0}.advice{padding-left:20px}}
@media print{body{max-width:none}figure,tr{break-inside:avoid}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, body: str) -> str:
    """Return a complete HTML page without scripts or external resources; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def svg_document(svg: str) -> str:
    """Return a chart from `line_chart` as a standalone SVG document with its style sheet."""
    style = f"<style>{_STYLE}svg{{background:var(--bg)}}</style>"
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg" font-family="system-ui,sans-serif">{style}{rest}'


def section(title: str, body: str) -> str:
    """Return a section with a heading, or an empty string if `body` is empty; only `title` is escaped."""
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>" if body else ""


def table(header: list[str], rows: list[list[str]], numeric: tuple[int, ...] = ()) -> str:
    """Return an HTML table with escaped cells; the columns whose indices are in `numeric` are right-aligned."""

    def cells(kind: str, row: list[str]) -> str:
        marks = (' class="num"' if index in numeric else "" for index in range(len(row)))
        return "".join(
            f"<{kind}{mark}>{escape(cell)}</{kind}>" for mark, cell in zip(marks, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
