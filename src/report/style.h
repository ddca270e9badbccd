// The look of the report page, and the script that shows values under the pointer. Used by
// report.cpp alone.
#pragma once

namespace weft::report_page {

inline constexpr const char* page_style = R"css(
:root { --ink:#1d2530; --soft:#5b6675; --line:#e3e7ec; --paper:#fff; --ground:#f5f6f8; }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink); line-height:1.45;
  font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif; }
main { max-width:1120px; margin:0 auto; padding:28px 24px 60px; }
header h1 { font-size:26px; margin:0 0 2px; letter-spacing:-.01em; overflow-wrap:anywhere; }
header p { margin:0; color:var(--soft); overflow-wrap:anywhere; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(140px,1fr)); gap:12px; margin:22px 0; }
.tile, section { background:var(--paper); border:1px solid var(--line); border-radius:10px; }
.tile { padding:12px 14px; }
.tile b { display:block; font-size:23px; font-weight:600; letter-spacing:-.01em;
  font-variant-numeric:tabular-nums; white-space:nowrap; }
.tile span { color:var(--soft); font-size:13px; }
section { padding:16px 20px 14px; margin:0 0 16px; min-width:0; }
h2 { font-size:16px; margin:0 0 2px; font-weight:600; }
.note { color:var(--soft); font-size:13px; margin:0 0 8px; }
.small { display:grid; grid-template-columns:repeat(auto-fit,minmax(310px,1fr)); gap:16px; margin:0 0 16px; }
.small section { margin:0; display:flex; flex-direction:column; padding:14px 14px 10px; }
.small section svg { margin-top:auto; }
svg { display:block; width:100%; height:auto; overflow:visible; }
.grid { stroke:#e9ecf0; stroke-width:1; }
.axis { stroke:#9aa4b1; stroke-width:1; }
.tick { font-size:12px; fill:#5b6675; font-variant-numeric:tabular-nums; }
.label { font-size:12.5px; fill:#3a4452; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:6px 0 8px; font-size:13px; color:#3a4452; }
.legend i { display:inline-block; width:18px; height:4px; border-radius:2px; margin-right:7px;
  vertical-align:middle; }
.legend .box { width:11px; height:11px; border-radius:3px; }
.legend em { color:var(--soft); font-style:normal; font-variant-numeric:tabular-nums; }
.bar { display:flex; height:22px; border-radius:5px; overflow:hidden; background:var(--line); }
.track { min-width:0; }
.many .bar { height:12px; border-radius:3px; }
.bars.many { gap:3px 14px; font-size:12px; }
h3 { font-size:13.5px; font-weight:600; margin:16px 0 4px; }
.bars span { font-variant-numeric:tabular-nums; }
.bars { display:grid; grid-template-columns:max-content 1fr max-content; gap:8px 14px; align-items:center;
  font-size:13px; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:14px; }
th, td { text-align:left; padding:6px 14px 6px 0; vertical-align:top; border-top:1px solid var(--line); }
tr:first-child th, tr:first-child td { border-top:0; }
th { font-weight:500; color:var(--soft); white-space:nowrap; }
td { font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
thead th { color:var(--ink); font-weight:600; }
details summary { cursor:pointer; font-weight:600; padding:2px 0; }
pre { font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  background:var(--ground); border-radius:8px; padding:12px 14px; overflow:auto; max-height:520px; }
.media { display:grid; grid-template-columns:repeat(auto-fill,minmax(300px,1fr)); gap:16px; margin-top:8px; }
figure { margin:0; }
figure img, figure video { width:100%; border-radius:6px; display:block; background:#000; }
figure.wide { grid-column:1/-1; }
figcaption { color:var(--soft); font-size:12.5px; margin-top:4px; overflow-wrap:anywhere; }
footer { color:var(--soft); font-size:12.5px; }
#value { position:absolute; pointer-events:none; display:none; background:#fffffff2; border:1px solid #cfd5dd;
  border-radius:7px; padding:6px 10px; font-size:12.5px; box-shadow:0 2px 8px #0002; white-space:nowrap;
  font-variant-numeric:tabular-nums; }
#value i { display:inline-block; width:9px; height:9px; border-radius:2px; margin-right:6px; }
@media (max-width:560px) { main { padding:16px 10px; } }
@media print { body { background:#fff; } section, .tile { break-inside:avoid; } }
)css";

inline constexpr const char* page_script = R"js(
const box = document.body.appendChild(document.createElement('div'));
box.id = 'value';
for (const svg of document.querySelectorAll('svg[data-plot]')) {
  const p = JSON.parse(svg.dataset.plot);
  const rule = svg.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'line'));
  rule.setAttribute('stroke', '#7b8694');
  rule.setAttribute('stroke-dasharray', '3 3');
  rule.setAttribute('y1', 10);
  rule.setAttribute('y2', p.base);
  const hide = () => { box.style.display = 'none'; rule.style.display = 'none'; };
  hide();
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', e => {
    const r = svg.getBoundingClientRect();
    const px = (e.clientX - r.left) * svg.viewBox.baseVal.width / r.width;
    const x = p.low + (px - p.from) / (p.to - p.from) * (p.high - p.low);
    const rows = [];
    let at = null;
    for (const c of p.curves) {
      let best = 0;
      c.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(c.x[best] - x)) best = i; });
      if (at === null || Math.abs(c.x[best] - x) < Math.abs(at - x)) at = c.x[best];
      const y = c.y[best];
      if (y !== null && y !== undefined)
        rows.push('<div><i style="background:' + c.k + '"></i>' + c.n + ' <b>' + y + '</b></div>');
    }
    if (at === null || px < p.from - 4 || px > p.to + 4) return hide();
    const line = p.from + (at - p.low) / (p.high - p.low) * (p.to - p.from);
    rule.setAttribute('x1', line);
    rule.setAttribute('x2', line);
    rule.style.display = '';
    const near = (p.labels || []).find(l => Math.abs(l[0] - at) < 1e-3);
    box.innerHTML = (p.what || 'step') + ' ' + (near ? near[1] : Math.round(at)) + rows.join('');
    box.style.display = 'block';
    const left = e.pageX + 16 + box.offsetWidth > document.documentElement.clientWidth;
    box.style.left = (e.pageX + (left ? -16 - box.offsetWidth : 16)) + 'px';
    box.style.top = (e.pageY + 12) + 'px';
  });
}
)js";

}  // namespace weft::report_page
