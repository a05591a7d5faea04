"""The style sheet of the pages, and the script that shows the values at which a reader points."""

from __future__ import annotations

from anysize.report.colours import variables


def style(sizes: int = 0) -> str:
    """The style sheet, with one colour for each of so many sizes, for light and for dark screens."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in own.items()) for own in variables(sizes))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_STYLE}"
    )


_STYLE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main, header, footer { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 40px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 8px; overflow-wrap: anywhere; }
.what { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.what > span:not(:last-child)::after { content: "\\00b7"; margin: 0 0.35em 0 0.6em; }
.what b { color: var(--ink); font-weight: 600; }
.finished { color: var(--good); font-weight: 600; } .running { color: var(--wait); font-weight: 600; }
section { margin-top: 40px; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 0 0 12px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
.card {
  background: var(--surface); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px 12px;
  margin: 0; min-width: 0;
}
.card + .card, .grid, .card + .grid { margin-top: 16px; }
.grid { display: grid; gap: 16px; } .grid .card { margin: 0; }
.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; }
.head > span { white-space: nowrap; }
a { color: var(--accent); }
.csv { font-size: 12px; color: var(--soft); text-decoration: none; border-bottom: 1px solid var(--line); }
.csv:hover, .csv:focus-visible { color: var(--accent); border-color: currentColor; }
.plot { margin-top: 6px; } .plot svg { width: 100%; height: auto; display: block; margin: 0 auto; }
.plot .narrow { display: none; max-width: 520px; } .plot .figure { max-width: 480px; }
.tip {
  position: fixed; z-index: 1; pointer-events: none; white-space: pre; padding: 5px 9px; max-width: 90vw;
  background: var(--surface); color: var(--ink); border: 1px solid var(--line); border-radius: 6px;
  font-size: 12.5px; line-height: 1.45; font-variant-numeric: tabular-nums;
}
.tip::first-line { font-weight: 600; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
/* A table that is wider than its card has a shadow on each side where there is more of it. */
.scroll {
  overflow-x: auto;
  background:
    linear-gradient(to right, var(--surface) 30%, transparent) left / 40px 100% no-repeat local,
    linear-gradient(to left, var(--surface) 30%, transparent) right / 40px 100% no-repeat local,
    linear-gradient(to right, var(--line), transparent) left / 16px 100% no-repeat scroll,
    linear-gradient(to left, var(--line), transparent) right / 16px 100% no-repeat scroll;
}
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 8px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 500; font-size: 12.5px; vertical-align: bottom; }
thead th { border-bottom-color: var(--line); white-space: normal; line-height: 1.3; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; }
/* A long name breaks, rather than push all numbers out of sight. */
.scroll tbody tr > :first-child { white-space: normal; overflow-wrap: break-word; max-width: 320px; }
.n { text-align: right; }
.main { font-weight: 600; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; }
pre, code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { overflow-x: auto; margin: 12px 0 0; }
.facts td, .facts th { white-space: normal; overflow-wrap: anywhere; vertical-align: top; padding: 4px 10px; }
.facts th { font-weight: 400; color: var(--soft); width: 30%; } .facts table { margin-top: 8px; }
.notices { margin: 0; padding-left: 20px; } .notices li + li { margin-top: 4px; }
footer { color: var(--soft); font-size: 13px; padding-top: 32px; padding-bottom: 40px; }
@media (max-width: 960px) { .three { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 640px) { .three { grid-template-columns: minmax(0, 1fr); } }
@media screen and (max-width: 760px) { .plot .wide { display: none; } .plot .narrow { display: block; } }
@media (max-width: 760px) { .two { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 760px) {
  header { padding-top: 24px; } main, header, footer { padding-left: 14px; padding-right: 14px; }
  th, td { padding: 6px 7px; } table { font-size: 13px; }
  .scroll th:first-child { position: sticky; left: 0; background: var(--surface); }
  .scroll th:first-child { white-space: normal; min-width: 68px; }
  .scroll tbody tr > :first-child { max-width: 40vw; }
}
@media print {
  @page { margin: 14mm; }
  body { background: none; font-size: 12px; } main, header, footer { padding-left: 0; padding-right: 0; }
  header { padding-top: 0; } section { margin-top: 24px; }
  .card { break-inside: avoid; } details.card { break-inside: auto; } h2 { break-after: avoid; }
  .csv { display: none; } .three, .two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  table { font-size: 10.5px; } th, td { padding: 4px 5px; } thead th { font-size: 10px; }
  .note { font-size: 11px; }
  pre { white-space: pre-wrap; }
}
"""

# Shows, beside the pointer, the values of the nearest point, of all lines at one place, or of a cell.
POINT = """
"use strict";
(() => {
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  document.body.append(tip);
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
  rule.setAttribute("fill", "none");
  rule.setAttribute("stroke", "var(--soft)");
  const hide = () => { tip.hidden = true; rule.remove(); };
  const show = (event, words) => {
    tip.textContent = words;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const right = event.clientX + 14 + width < innerWidth;
    tip.style.left = Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - width) + "px";
    tip.style.top = Math.max(4, event.clientY - 12 - height) + "px";
  };
  const cell = ({ cells, x, y, unit }, across, down) => {
    const column = Math.floor(across * x.length), row = Math.floor(down * y.length);
    const value = cells[row]?.[column];
    if (value === undefined) return null;
    return [y[row], x[column], (value ?? "no value") + (unit ? " " + unit : "")].join("\\n");
  };
  const point = (told, svg, event) => {
    const bounds = svg.getBoundingClientRect(), zoom = bounds.width / svg.viewBox.baseVal.width;
    const [left, top, right, bottom] = svg.dataset.area.split(" ").map(Number);
    const x = (event.clientX - bounds.left) / zoom, y = (event.clientY - bounds.top) / zoom;
    if (x < left - 30 || x > right + 30 || y < top - 20 || y > bottom + 20) return hide();
    if (told.cells) {
      const words = cell(told, (x - left) / (right - left), (y - top) / (bottom - top));
      return words === null ? hide() : show(event, words);
    }
    const placed = told.points.map(([a, b, words]) => {
      const px = left + a * (right - left), py = b === null ? null : top + b * (bottom - top);
      return { px, py, words, distance: Math.hypot(px - x, py === null ? 0 : py - y) };
    });
    if (!placed.length) return hide();
    const near = placed.reduce((best, next) => next.distance < best.distance ? next : best);
    if (near.py !== null && near.distance > 60) return hide();
    const { px, py } = near;
    rule.setAttribute("d", py === null ? `M${px} ${top}V${bottom}` : `M${px - 9} ${py}a9 9 0 1 0 18 0a9 9 0 1 0 -18 0`);
    svg.append(rule);
    show(event, near.words);
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const told = JSON.parse(document.getElementById(plot.dataset.told).textContent);
    for (const svg of plot.querySelectorAll("svg")) {
      for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, event => point(told, svg, event));
      svg.addEventListener("pointerleave", hide);
    }
  }
  addEventListener("scroll", hide, { passive: true });
})();
"""
