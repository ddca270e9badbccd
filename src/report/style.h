// The look of the pages, in light and dark, and the script that shows values under the pointer and
// plays the clips in view. Used by html.cpp alone.
#pragma once

namespace weft::report_page {

inline constexpr const char* page_style = R"css(
:root { color-scheme:light dark;
  --ink:#1d2530; --text:#3a4452; --soft:#5b6675; --line:#e3e7ec; --axis:#9aa4b1;
  --paper:#fff; --ground:#f5f6f8; --link:#1f5fa8; --shade:#0002;
  --run0:#2f6db5; --run1:#cf6a1c; --run2:#2f8469; --run3:#b8456b;
  --run4:#7a5fa8; --run5:#86752a; --run6:#2f8fb8; --run7:#6b6f76;
  --part0:#3f74b8; --part1:#7a2f55; --part2:#d9772b; --part3:#5f9c88;
  --part4:#c8474b; --part5:#8b6db0; --part6:#8b94a1; }
@media (prefers-color-scheme: dark) { :root {
  --ink:#e6eaf0; --text:#c3ccd8; --soft:#9fabba; --line:#2a323d; --axis:#5d6877;
  --paper:#171c23; --ground:#0e1217; --link:#7db4f5; --shade:#0008;
  --run0:#6ea8ee; --run1:#f0954d; --run2:#5cc3a3; --run3:#e87fa1;
  --run4:#b39ae0; --run5:#c9b653; --run6:#6cc4e6; --run7:#a3a9b2;
  --part0:#5b93dc; --part1:#c26a94; --part2:#f0a35c; --part3:#8ccbb7;
  --part4:#ef6b6e; --part5:#ab8fd6; --part6:#78828f; } }
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
  font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
.tile span { color:var(--soft); font-size:13px; }
section { padding:16px 20px 14px; margin:0 0 16px; min-width:0; }
h2 { font-size:16px; margin:0 0 2px; font-weight:600; }
.note { color:var(--soft); font-size:13px; margin:0 0 8px; }
.small { display:grid; grid-template-columns:repeat(auto-fit,minmax(310px,1fr)); gap:16px; margin:0 0 16px; }
.small section { margin:0; display:flex; flex-direction:column; padding:14px 14px 10px; }
.small section svg { margin-top:auto; }
svg { display:block; width:100%; height:auto; overflow:visible; }
.grid { stroke:var(--line); stroke-width:1; }
.restart { stroke:var(--soft); stroke-width:1.5; stroke-dasharray:2 4; }
.axis { stroke:var(--axis); stroke-width:1; }
.tick { font-size:12px; fill:var(--soft); font-variant-numeric:tabular-nums; }
.label { font-size:12.5px; fill:var(--text); }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:6px 0 8px; font-size:13px; color:var(--text); }
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
figcaption b { color:var(--ink); font-weight:500; display:block; }
a { color:var(--link); }
.linked { display:flex; align-items:center; justify-content:center; text-align:center; min-height:120px;
  padding:12px; border:1px dashed var(--axis); border-radius:6px; font-size:13px; overflow-wrap:anywhere; }
.meter { display:inline-block; width:130px; height:9px; margin-right:6px; border-radius:3px;
  background:var(--line); overflow:hidden; vertical-align:middle; }
.meter i { display:block; height:100%; }
figcaption { color:var(--soft); font-size:12.5px; margin-top:4px; overflow-wrap:anywhere; }
footer { color:var(--soft); font-size:12.5px; }
#value { position:absolute; pointer-events:none; display:none; background:var(--paper); border:1px solid var(--axis);
  border-radius:7px; padding:6px 10px; font-size:12.5px; box-shadow:0 2px 8px var(--shade); white-space:nowrap;
  font-variant-numeric:tabular-nums; }
#value i { display:inline-block; width:9px; height:9px; border-radius:2px; margin-right:6px; }
@media (max-width:560px) { main { padding:16px 10px; } section { padding:12px 12px 10px; overflow-x:auto; }
  /* Wide charts keep letters that can be read, and are pushed sideways. */
  main > section > svg { min-width:800px; }
  .bars { grid-template-columns:1fr; gap:2px; } .bars > span:nth-of-type(2n) { margin-bottom:8px; } }
@media print { body { background:#fff; color:#000; } section, .tile { break-inside:avoid; } }
)css";

inline constexpr const char* page_script = R"js(
const box = document.body.appendChild(document.createElement('div'));
box.id = 'value';
for (const svg of document.querySelectorAll('svg[data-plot]')) {
  const p = JSON.parse(svg.dataset.plot);
  const rule = svg.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'line'));
  rule.setAttribute('class', 'axis');
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
if (!matchMedia('(prefers-reduced-motion: reduce)').matches) {
  const seen = new IntersectionObserver(entries => entries.forEach(e => {
    if (e.isIntersecting) e.target.play().catch(() => {}); else e.target.pause();
  }));
  for (const video of document.querySelectorAll('video[muted]')) {
    seen.observe(video);
    video.controls = false;  // they would cover a small clip
    video.addEventListener('pointerenter', () => { video.controls = true; });
    video.addEventListener('pointerleave', () => { video.controls = false; });
  }
}
)js";

}  // namespace weft::report_page
