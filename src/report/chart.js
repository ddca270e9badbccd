'use strict';
// Elements, numbers and charts of a page. Text from data becomes text alone: el() and svg() set no
// markup, and nothing else makes elements.

// An element "tag.class"; what is null or false among its children is left out.
function el(tag, ...children) {
  const [name, ...classes] = tag.split('.');
  const e = document.createElement(name);
  if (classes.length) e.className = classes.join(' ');
  e.append(...children.flat(9).filter(c => c || c === 0).map(c => c.nodeType ? c : visible(c)));
  return e;
}
// Control characters, and those that turn the direction of writing, are shown and not obeyed.
const visible = text => String(text).replace(
  /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
  c => c < '\x80' ? '\\x' + c.charCodeAt(0).toString(16).padStart(2, '0') : '\\u'
    + c.charCodeAt(0).toString(16).padStart(4, '0'));
function svg(name, attributes, text = '') {
  const e = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) e.setAttribute(key, attributes[key]);
  e.textContent = visible(text);
  return e;
}
const color = i => `var(--run${i % 8})`;

// ---- Numbers ----

const known = v => typeof v === 'number' && isFinite(v);
const grouped = v => Math.abs(v) < 1e4 ? String(v) : v.toLocaleString('en-US');
function short(v) {
  if (!known(v)) return '-';
  if (Number.isInteger(v) && Math.abs(v) < 1e7) return grouped(v);
  return Math.abs(v) < 1e-4 || Math.abs(v) >= 1e6 ? v.toPrecision(4).replace(/\.?0+e/, 'e')
    : String(+v.toPrecision(4));
}
function seconds(s) {
  if (!known(s)) return '-';
  if (s < 1e-3) return `${(s * 1e6).toFixed()} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.1 ? 1 : 0)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  // Rounded before it is divided: never "3 min 60 s".
  const parts = (whole, of, low) =>
    `${Math.floor(whole / of)} ${low[0]} ${String(whole % of).padStart(2, '0')} ${low[1]}`;
  if (s < 7200) return parts(Math.round(s), 60, ['min', 's']);
  return s < 172800 ? parts(Math.round(s / 60), 60, ['h', 'min']) : parts(Math.round(s / 3600), 24, ['d', 'h']);
}
const bytes = b => !known(b) ? '-' : b >= 1e9 ? `${(b / 1e9).toFixed(2)} GB`
  : `${(b / 1e6).toFixed(b < 1e7 ? 1 : 0)} MB`;
function percent(part, whole = 1) {
  const p = 100 * part / whole;
  return whole > 0 && known(p) ? `${p.toFixed(p < 10 ? 1 : 0)} %` : '-';
}
const share = s => known(s) ? `${(100 * s).toFixed(2)} %` : '-';
const loss = v => !known(v) ? '-' : Math.abs(v) < 10 ? v.toFixed(4) : String(+v.toPrecision(5));
const rate = r => !known(r) ? '-' : r < 100 ? String(+r.toPrecision(3)) : grouped(Math.round(r));
const counted = (n, noun) => `${grouped(n)} ${noun}${n === 1 ? '' : 's'}`;

// What an axis of a unit counts in, up to `most`: how many of the unit, and its name.
function scaleOf(unit, most) {
  const pick = steps => steps.find(([least]) => most >= least) ?? steps.at(-1);
  if (unit === 's') return pick([[10800, 3600, 'hours'], [180, 60, 'minutes'], [1, 1, 's'],
    [0, 1e-3, 'ms']]).slice(1);
  if (unit === 'bytes') return pick([[2e9, 1e9, 'GB'], [0, 1e6, 'MB']]).slice(1);
  if (unit === '%') return [0.01, '%'];
  if (unit !== 'power' || !(most > 0)) return [1, ''];
  const power = Math.floor(Math.log10(most) + 1e-9);  // rates have no digits worth reading otherwise
  return [10 ** power, `1e${power}`];
}

// ---- Curves: {name, color, x, y, width, opacity, low, high, reach}, whose missing values are null ----

// A Gaussian average over neighbours; missing values drop out.
function smooth(y, sigma = Math.max(1, y.length / 60)) {
  return y.map((_, i) => {
    let sum = 0, weights = 0;
    for (let k = Math.max(0, i - Math.ceil(3 * sigma)); k <= Math.min(y.length - 1, i + 3 * sigma); ++k) {
      if (!known(y[k])) continue;
      const w = Math.exp(-0.5 * ((k - i) / sigma) ** 2);
      sum += w * y[k];
      weights += w;
    }
    return weights > 0 ? sum / weights : null;
  });
}
// Columns that lie on those of the curves before, all over the same x.
function stacked(curves) {
  const base = curves.length ? curves[0].x.map(() => 0) : [];
  for (const c of curves) {
    c.width = 0;
    c.reach = c.x.length > 1 ? (c.x[1] - c.x[0]) / 2 : 0.5;
    c.low = [...base];
    c.y.forEach((v, i) => { base[i] += known(v) ? v : 0; });
    c.high = [...base];
  }
  return curves;
}

// ---- Axes ----

// Round numbers that cover [low, high], about `count` of them (1, 2 or 5 times a power of ten).
function roundTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
  // Too close, or too far out, to be told apart: the loop would have no end.
  if (!isFinite(step) || !(step > 1e-14 * Math.max(Math.abs(low), Math.abs(high)))) return [low];
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) ticks.push(i * step);
  return ticks.length ? ticks : [Math.round(low / step) * step];
}
function logTicks(low, high) {
  const ticks = [], marks = high - low < 2.5 ? [1, 2, 5] : [1];  // decades
  for (let d = Math.floor(low); d <= Math.ceil(high); ++d)
    ticks.push(...marks.map(m => m * 10 ** d).filter(t => Math.log10(t) >= low - 1e-9 && Math.log10(t) <= high
      + 1e-9));
  return ticks;
}
// From the first value to the last, edge to edge.
function xAxis([low, high], frame, from, to) {
  if (high <= low) [low, high] = [low - 0.5, high + 0.5];
  let ticks = roundTicks(low, high, Math.min(8, Math.max(3, (to - from) / 56)));
  if (frame.whole) ticks = ticks.filter(Number.isInteger);
  return {low, high, ticks, at: v => from + (to - from) * (v - low) / (high - low)};
}
// The axis ends on ticks: the curves get some room and both ends a number.
function yAxis([low, high], frame, from, to) {
  const axis = (l, h, ticks, log) =>
    ({log, ticks, at: v => from + (to - from) * ((log ? Math.log10(v) : v) - l) / (h - l)});
  if (frame.log && low > 0 && high / low > 50) {
    const l = Math.log10(low) - 0.05, h = Math.log10(high) + 0.05;
    return axis(l, h, logTicks(l, h), true);
  }
  if (frame.zero) low = Math.min(low, 0);
  if (high <= low) {
    const pad = low === 0 ? 1 : Math.abs(low) * 0.1;
    high += pad;
    if (!frame.zero) low -= pad;
  }
  const ticks = roundTicks(low, high, 5), step = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
  if (ticks[0] > low + step * 1e-9) ticks.unshift(ticks[0] - step);
  if (ticks.at(-1) < high - step * 1e-9) ticks.push(ticks.at(-1) + step);
  return axis(ticks[0], ticks.at(-1), ticks, false);
}
// Ticks of one axis share the number of decimals.
function tickText(t, {ticks, log}) {
  if (log || ticks.length < 2) return short(+t.toPrecision(4));
  const step = Math.abs(ticks[1] - ticks[0]), most = Math.max(Math.abs(ticks[0]), Math.abs(ticks.at(-1)));
  if (Math.abs(t) < step * 1e-6) return '0';
  const power = Math.floor(Math.log10(step) + 1e-9);
  if (most >= 1e7 || most < 1e-3) return t.toExponential(Math.max(0,
    Math.floor(Math.log10(Math.abs(t)) + 1e-9) - power));
  return power >= 0 ? grouped(Math.round(t)) : t.toFixed(-power);
}

// ---- A chart ----

const margin = {left: 64, right: 14, top: 10, bottom: 42};
const box = document.body.appendChild(el('div'));  // the values under the pointer
box.id = 'value';

// Frame: x, y (names), unit (of y), xUnit, height, zero (y begins there), log (where values span more
// than a factor of 50), whole (x counts), labels ([place on the x axis, text], for axes that are not
// linear), restarts (places of dotted lines). It is drawn as wide as it lies on the page.
function chart(frame, curves) {
  const values = (pick, reach = 0) =>
    curves.flatMap(c => pick(c).filter(known).flatMap(v =>
    [v - (reach && (c.reach ?? 0)), v + (reach && (c.reach ?? 0))]));
  const range = v => v.length ? [v.reduce((a, b) => Math.min(a, b)), v.reduce((a, b) => Math.max(a, b))] : [0, 1];
  const xs = range(values(c => c.x, 1)), ys = range(values(c => [c.y, c.low ?? [], c.high ?? []].flat()));
  const [xBy, xName] = scaleOf(frame.xUnit, xs[1]), [yBy, yName] = scaleOf(frame.unit, ys[1]);
  const by = (list, d) => list && list.map(v => known(v) ? v / d : null);
  const scaled = curves.map(c =>
    ({...c, x: by(c.x, xBy), y: by(c.y, yBy), low: by(c.low, yBy), high: by(c.high, yBy),
    reach: (c.reach ?? 0) / xBy}));
  const spans = [xs.map(v => v / xBy), ys.map(v => v / yBy)];
  const names = [frame.x + (xName && ` (${xName})`), frame.y + (yName && ` (${yName})`)];
  const holder = el('div.chart');
  holder.curves = scaled;  // as they are drawn
  let drawn = 0;
  new ResizeObserver(() => {
    const width = holder.clientWidth;
    if (width > 0 && width !== drawn) holder.replaceChildren(draw(drawn = width, frame, scaled, spans, names));
  }).observe(holder);
  return holder;
}

function draw(width, frame, curves, [xs, ys], [xName, yName]) {
  const height = Math.min(frame.height ?? 280, width < 500 ? 240 : 900);
  const end = width - margin.right, base = height - margin.bottom;
  const x = xAxis(xs, frame, margin.left, end), y = yAxis(ys, frame, base, margin.top);
  const s = svg('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${yName} by ${xName}`});
  const line = (kind, x1, x2, y1, y2) => s.appendChild(svg('line', {class: kind, x1, x2, y1, y2}));
  const label = (kind, text, attributes) =>
    s.append(svg('text', {class: kind, 'text-anchor': 'middle', ...attributes}, text));
  for (const t of y.ticks) {
    line('grid', margin.left, end, y.at(t), y.at(t));
    label('tick', tickText(t, y), {x: margin.left - 8, y: y.at(t) + 4, 'text-anchor': 'end'});
  }
  for (const [t, text] of frame.labels ?? x.ticks.map(t => [t, tickText(t, x)])) {
    line('axis', x.at(t), x.at(t), base, base + 4);
    label('tick', text, {x: x.at(t), y: base + 17});
  }
  line('axis', margin.left, end, base, base);
  label('label', xName, {x: (margin.left + end) / 2, y: height - 6});
  label('label', yName + (y.log ? ' (log)' : ''),
    {transform: `translate(13 ${(margin.top + base) / 2}) rotate(-90)`});
  const path = (d, style, opacity = 1, width = 0) =>
    s.append(svg('path', {d, style, opacity, 'stroke-width': width, 'stroke-linejoin': 'round',
    'stroke-linecap': 'round'}));
  const place = (px, py) => `${px.toFixed(1)} ${py.toFixed(1)}`;
  for (const c of curves.filter(c => c.low)) {
    // Out along the upper edge and back along the lower one.
    const at = c.x.flatMap((v, i) => !known(c.low[i]) ? [] : c.reach ? [[v - c.reach, i], [v + c.reach, i]]
      : [[v, i]]);
    const edge = (list, of) => list.map(([v, i]) => place(x.at(v), y.at(of[i])));
    if (at.length) path(`M${[...edge(at, c.high), ...edge([...at].reverse(), c.low)].join('L')}Z`, `fill:${c.color}`,
      c.reach ? 1 : 0.18);
  }
  for (const c of curves.filter(c => c.width !== 0)) {
    let d = '', down = false;
    c.x.forEach((v, i) => {
      const there = known(c.y[i]) && (!y.log || c.y[i] > 0);
      // The empty stroke after a start makes a dot of a point that stands alone.
      if (there) d += (down ? 'L' : 'M') + place(x.at(v), y.at(c.y[i])) + (down ? '' : 'h0');
      down = there && !c.dots;
    });
    if (d) path(d, `fill:none;stroke:${c.color}`, c.opacity, c.width ?? 1.8);
  }
  for (const t of frame.restarts ?? []) if (t >= x.low && t <= x.high) line('restart', x.at(t), x.at(t), margin.top,
    base);
  showValues(s, frame, curves, x, width, line('axis', 0, 0, margin.top, base));
  return s;
}

// The values of all curves with names at the x under the pointer.
function showValues(s, frame, curves, x, width, rule) {
  rule.setAttribute('stroke-dasharray', '3 3');
  const hide = () => { box.style.display = rule.style.display = 'none'; };
  hide();
  s.addEventListener('pointerleave', hide);
  const show = e => {
    const r = s.getBoundingClientRect(), px = (e.clientX - r.left) * width / r.width;
    const under = x.low + (px - x.at(x.low)) / (x.at(x.high) - x.at(x.low)) * (x.high - x.low);
    const rows = [];
    let at = null;
    for (const c of curves.filter(c => c.name)) {
      // None of a run that ended earlier.
      const edge = Math.max((x.high - x.low) / 50, (c.x[1] - c.x[0]) / 2 || 0);
      if (!c.x.length || under < c.x[0] - edge || under > c.x.at(-1) + edge) continue;
      let best = 0;
      c.x.forEach((v, i) => { if (Math.abs(v - under) < Math.abs(c.x[best] - under)) best = i; });
      if (at === null || Math.abs(c.x[best] - under) < Math.abs(at - under)) at = c.x[best];
      if (known(c.y[best])) rows.push(el('div', swatch({color: c.color}), c.name, ' ',
        el('b', +c.y[best].toPrecision(5))));
    }
    if (at === null || px < x.at(x.low) - 4 || px > x.at(x.high) + 4) return hide();
    rule.setAttribute('x1', x.at(at));
    rule.setAttribute('x2', x.at(at));
    rule.style.display = '';
    const near = (frame.labels ?? []).find(([place]) => Math.abs(place - at) < 1e-3);
    box.replaceChildren(`${frame.x} ${near ? near[1] : frame.whole ? Math.round(at) : short(at)}`, ...rows);
    box.style.display = 'block';
    const left = e.pageX + 16 + box.offsetWidth > document.documentElement.clientWidth;
    box.style.left = Math.max(4, e.pageX + (left ? -16 - box.offsetWidth : 16)) + 'px';
    box.style.top = (e.pageY + 12) + 'px';
  };
  s.addEventListener('pointermove', show);
  s.addEventListener('pointerdown', show);  // a finger
}

// A curve without axes, for a row of a table.
function sparkline(y) {
  const values = y.filter(known), low = Math.min(...values), high = Math.max(...values);
  if (values.length < 2) return null;
  const across = i => 3 + 104 * i / (y.length - 1), up = v => 25 - 22 * (v - low) / (high - low || 1);
  const at = (v, i) => `${across(i).toFixed(1)} ${up(v).toFixed(1)}`;
  const s = svg('svg', {class: 'spark', viewBox: '0 0 110 28', 'aria-hidden': 'true'});
  s.append(svg('polyline',
    {points: y.map((v, i) => known(v) ? at(v, i) : '').join(' '), style: `fill:none;stroke:${color(0)}`,
    'stroke-width': 1.6}));
  return s;
}
