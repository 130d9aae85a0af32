"""The style sheet and the script of the HTML report: inlined, so that the page needs no network and opens from disk."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --page: #fbfbfa; --card: #fff; --edge: #dfe2e6;
  --band: #f1f3f5; --blue: #1f66d1; --orange: #c96a00; --red: #c8202f; --green: #1a7f46; --purple: #8a3fb8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4b0; --page: #15181c; --card: #1d2126;
  --edge: #343a42; --band: #23282f; --blue: #6aa5ff; --orange: #f0a04b; --red: #ff6b76; --green: #57c785;
  --purple: #c58ae8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 22px; line-height: 1.35; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 32px 0 8px; }
code, td.name, .source { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
.headline { background: var(--card); border: 1px solid var(--edge); border-left: 6px solid var(--tone);
  padding: 16px 20px;
  border-radius: 6px; }
.headline.aligned { --tone: var(--green); } .headline.drift { --tone: var(--red); }
.headline.incomparable { --tone: var(--orange); }
.verdict { color: var(--tone); font-weight: 700; letter-spacing: .04em; margin-right: .5em; }
.headline p { margin: 10px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(196px, 1fr)); gap: 12px; margin-top: 14px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 10px 14px; }
.card b { display: block; font-size: 12px; color: var(--soft); font-weight: 600; }
.card span { font-size: 17px; font-variant-numeric: tabular-nums; } .card small { color: var(--soft); display: block; }
.plot { width: 100%; height: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 6px; }
.grid { stroke: var(--edge); }
.tick { fill: var(--soft); font: 11px system-ui, sans-serif; } .band { fill: var(--band); }
.line-budget { fill: none; stroke: var(--soft); stroke-width: 1.6; }
.fault { fill: var(--red); font: 600 12px ui-monospace, "DejaVu Sans Mono", monospace; paint-order: stroke;
  stroke: var(--card); stroke-width: 4px; }
.grid.limit { stroke: var(--soft); stroke-dasharray: 5 4; }
.kind { font: 11px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--ink); }
.sibling { fill-opacity: .6; } .sibling.drift { fill-opacity: 1; }
.mark.inherited { fill: var(--blue); }
.tree { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 10px 14px;
  font-size: 13px; }
.tree ul { list-style: none; margin: 0; padding-left: 18px; } .tree > ul { padding-left: 0; }
.tree ul ul { border-left: 1px solid var(--edge); }
.tree li { padding: 2px 0; overflow-wrap: anywhere; } .tree small { color: var(--soft); margin-left: .4em; }
.tree summary { color: inherit; } .tree li.leaf { padding-left: 15px; }
.tree b { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.story { border-left: 3px solid var(--red); margin: 4px 0 4px 14px; padding: 2px 10px; max-width: 90ch; }
.story p { margin: 2px 0; }
.status.invalid { color: var(--red); } .status.uncovered { color: var(--orange); }
.status.note { color: var(--blue); } .headline .void { color: var(--red); }
.line-inherited { fill: none; stroke: var(--orange); stroke-width: 1.8; }
.stem { stroke: var(--blue); stroke-opacity: .22; } .stem.drift { stroke: var(--red); stroke-opacity: .8; }
.mark { fill: var(--blue); } .mark.drift { fill: var(--red); } .mark.flipped { fill: var(--purple); }
.mark.skipped { fill: var(--soft); }
.key { color: var(--soft); font-size: 13px; margin: 6px 0 0; } .key i { font-style: normal; font-weight: 700; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { font-size: 12px; color: var(--soft); font-weight: 600; background: var(--band); position: sticky;
  top: 0; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.figure, th.figure { text-align: right; white-space: nowrap; } td.name { overflow-wrap: anywhere; min-width: 300px; }
td.op { white-space: nowrap; }
#causes td:first-child, #lint td:first-child { overflow-wrap: anywhere; min-width: 130px; }
td.why { min-width: 180px; color: var(--soft); font-size: 13px; } .source { color: var(--soft); display: block; }
.status { font-weight: 700; font-size: 12px; white-space: nowrap; } .status.ok { color: var(--green); }
.status.drift { color: var(--red); }
.status.inherited { color: var(--orange); } .status.flipped { color: var(--purple); }
.status.skipped { color: var(--soft); }
tr.drift td { background: color-mix(in srgb, var(--red) 8%, transparent); }
.filter { display: flex; flex-wrap: wrap; gap: 14px; align-items: center; margin: 0 0 10px; font-size: 14px; }
.filter input[type=search] { font: inherit; padding: 5px 10px; min-width: 380px; color: inherit;
  background: var(--card);
  border: 1px solid var(--edge); border-radius: 5px; }
ul { margin: 6px 0; padding-left: 20px; } details summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 6px;
  padding: 12px; font-size: 12px; }
"""

SCRIPT = """
const rows = [...document.querySelectorAll('#modules tbody tr')];
const text = document.querySelector('#filter');
const boxes = [...document.querySelectorAll('.filter input[type=checkbox]')];
const shown = document.querySelector('#shown');
function apply() {
  let test;
  try { const expression = new RegExp(text.value, 'i'); test = (name) => expression.test(name); }
  catch { test = (name) => name.includes(text.value); }
  const allowed = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  let count = 0;
  for (const row of rows) {
    row.hidden = !(allowed.has(row.dataset.status) && test(row.dataset.name));
    count += row.hidden ? 0 : 1;
  }
  shown.textContent = `${count} of ${rows.length} rows`;
}
if (text) { text.addEventListener('input', apply);
  boxes.forEach((box) => box.addEventListener('change', apply)); apply(); }
"""
