// Shows the values of a chart under the pointer, sorts the table of jobs and plays the clips in view.
// A page can be read without it.

// ---- The values under the pointer ----

const margin = {left: 64, right: 14, top: 10, bottom: 42};  // of a chart, as in plot.cpp
const box = document.body.appendChild(document.createElement('div'));
box.id = 'value';

function showValues(svg, plot) {
  const {width, height} = svg.viewBox.baseVal, [low, high] = JSON.parse(svg.dataset.range);
  const from = margin.left, to = width - margin.right;
  const rule = svg.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'line'));
  rule.setAttribute('class', 'axis');
  rule.setAttribute('stroke-dasharray', '3 3');
  rule.setAttribute('y1', margin.top);
  rule.setAttribute('y2', height - margin.bottom);
  const hide = () => { box.style.display = rule.style.display = 'none'; };
  hide();
  svg.addEventListener('pointerleave', hide);
  const show = e => {
    const r = svg.getBoundingClientRect();
    const px = (e.clientX - r.left) * width / r.width;
    const x = low + (px - from) / (to - from) * (high - low);
    const rows = [];
    let at = null;
    for (const c of plot.curves) {
      // None of a run that ended earlier.
      const edge = Math.max((high - low) / 50, (c.x[1] - c.x[0]) / 2 || 0);
      if (x < c.x[0] - edge || x > c.x[c.x.length - 1] + edge) continue;
      let best = 0;
      c.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(c.x[best] - x)) best = i; });
      if (at === null || Math.abs(c.x[best] - x) < Math.abs(at - x)) at = c.x[best];
      if (c.y[best] !== null)
        rows.push(`<div><i style="background:${c.k}"></i>${c.n} <b>${c.y[best]}</b></div>`);
    }
    if (at === null || px < from - 4 || px > to + 4) return hide();
    const line = from + (at - low) / (high - low) * (to - from);
    rule.setAttribute('x1', line);
    rule.setAttribute('x2', line);
    rule.style.display = '';
    const near = plot.labels.find(l => Math.abs(l[0] - at) < 1e-3);
    box.innerHTML = `${plot.what} ${near ? near[1] : Math.round(at)}${rows.join('')}`;
    box.style.display = 'block';
    const left = e.pageX + 16 + box.offsetWidth > document.documentElement.clientWidth;
    box.style.left = Math.max(4, e.pageX + (left ? -16 - box.offsetWidth : 16)) + 'px';
    box.style.top = (e.pageY + 12) + 'px';
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);  // a finger
}
for (const chart of document.querySelectorAll('.chart'))
  for (const svg of [...chart.children]) showValues(svg, JSON.parse(chart.dataset.plot));

// ---- The table of jobs, which a click on a column's title sorts ----

for (const table of document.querySelectorAll('table.jobs'))
  for (const button of table.querySelectorAll('th button'))
    button.addEventListener('click', () => {
      const head = button.parentNode, up = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of head.parentNode.cells) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const value = row => row.cells[head.cellIndex].dataset.v;
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === '' || y === '') return (x === '') - (y === '');  // the unknown come last
        const apart = isNaN(x - y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
        return up ? apart : -apart;
      }));
    });

// ---- Clips ----

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
