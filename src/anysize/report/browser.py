"""The page's style sheet, and the script that draws its figures in the browser."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --surface: #ffffff; --ink: #1c1f23; --soft: #5a616b; --line: #d3d6da; --grid: #ebecee;
  --accent: #3b6ea5; --good: #1e7a4c; --wait: #8a5a00;
  --heat-0: #f1f2f4; --heat-1: #2f9a94; --heat-2: #3b0f53;
  --series-0: #0072b2; --series-1: #c65200; --series-2: #00815e; --series-3: #b0558a;
  --series-4: #8a6d00; --series-5: #2f7fb5; --series-6: #6b4c9a; --series-7: #5f6670;
  LIGHT
}
@media screen and (prefers-color-scheme: dark) {
  :root:not(.paper) {
    --page: #111418; --surface: #191d23; --ink: #e6e8eb; --soft: #a0a8b3; --line: #3a414b; --grid: #272d35;
    --accent: #79a8dc; --good: #5fce95; --wait: #e0b050;
    --heat-0: #20262d; --heat-1: #2a858c; --heat-2: #fde725;
    --series-0: #5fb0e8; --series-1: #f08a4b; --series-2: #3fcf9f; --series-3: #e59cc6;
    --series-4: #e3c04a; --series-5: #8fd0f7; --series-6: #b59ae0; --series-7: #a0a8b3;
    DARK
  }
}
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
a { color: var(--accent); }
.csv { font-size: 12px; color: var(--soft); text-decoration: none; border-bottom: 1px solid var(--line); }
.csv:hover, .csv:focus-visible { color: var(--accent); border-color: currentColor; }
.plot { width: 100%; margin-top: 6px; overflow: hidden; }
.plot .modebar { opacity: 0; } .plot:hover .modebar { opacity: 1; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 8px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 500; font-size: 12.5px; vertical-align: bottom; }
thead th { border-bottom-color: var(--line); white-space: normal; line-height: 1.3; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; }
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
@media (max-width: 960px) { .three { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 760px) { .two { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 760px) {
  header { padding-top: 24px; } main, header, footer { padding-left: 14px; padding-right: 14px; }
  th, td { padding: 6px 7px; } table { font-size: 13px; }
}
.paper body { background: none; font-size: 12px; }
.paper main, .paper header, .paper footer { max-width: 680px; padding-left: 0; padding-right: 0; }
.paper .three, .paper .two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
@media print {
  @page { margin: 14mm; }
  body { background: none; } main, header, footer { padding-left: 0; padding-right: 0; }
  header { padding-top: 0; } section { margin-top: 24px; }
  .card { break-inside: avoid; } details.card { break-inside: auto; } h2 { break-after: avoid; }
  .csv, .modebar-container { display: none; }
  table { font-size: 10.5px; } th, td { padding: 4px 5px; } thead th { font-size: 10px; }
  .note { font-size: 11px; }
  pre { white-space: pre-wrap; }
}
"""

# Draws every figure with the style sheet's current colours, at the width of its card.
DRAW = """
"use strict";
(() => {
  const root = document.documentElement;
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  const resolved = value => {
    if (typeof value === "string") return value.replace(/^var\\((--[a-z0-9-]+)\\)$/, (_, name) => css(name));
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, resolved(part)]));
    return value;
  };
  const plots = [...document.querySelectorAll(".plot")];
  const spec = plot => JSON.parse(document.getElementById(plot.dataset.spec).textContent);
  const specs = new Map(plots.map(plot => [plot, spec(plot)]));
  const options = plot => ({
    displaylogo: false,
    modeBarButtons: [["toImage", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: plot.dataset.spec.replace("spec-", "") },
  });
  const draw = plot => {
    const { data, layout } = resolved(specs.get(plot));
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    Plotly.react(plot, data, { ...layout, ...size }, options(plot));
  };
  const drawAll = () => plots.forEach(draw);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const widths = new Map(plots.map(plot => [plot, plot.clientWidth]));
  const watch = new ResizeObserver(entries => entries.forEach(({ target }) => {
    if (target.clientWidth === widths.get(target)) return;
    widths.set(target, target.clientWidth);
    draw(target);
  }));
  plots.forEach(plot => watch.observe(plot));
  addEventListener("beforeprint", () => { root.classList.add("paper"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); drawAll(); });
})();
"""
