// Shows the values of a chart under the pointer, sorts the table of jobs and plays the clips in view.
// A page can be read without it.
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
  const show = e => {
    const r = svg.getBoundingClientRect();
    const px = (e.clientX - r.left) * svg.viewBox.baseVal.width / r.width;
    const x = p.low + (px - p.from) / (p.to - p.from) * (p.high - p.low);
    const rows = [];
    let at = null;
    for (const c of p.curves) {
      // None of a run that ended earlier.
      const edge = Math.max((p.high - p.low) / 50, (c.x[1] - c.x[0]) / 2 || 0);
      if (x < c.x[0] - edge || x > c.x[c.x.length - 1] + edge) continue;
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
    box.style.left = Math.max(4, e.pageX + (left ? -16 - box.offsetWidth : 16)) + 'px';
    box.style.top = (e.pageY + 12) + 'px';
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);  // a finger
}
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
