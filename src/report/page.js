// What each kind of page shows of its data (page.h). Of files that others may have written nothing is
// taken for granted: a member that is not what it should be is left out.

const page = JSON.parse(document.getElementById('data').textContent);
const list = x => Array.isArray(x) ? x : [];
const object = x => x && typeof x === 'object' && !Array.isArray(x) ? x : {};
const text = x => typeof x === 'string' ? x : known(x) ? String(Number.isInteger(x) ? x : +x.toPrecision(4)) : '';
const sum = values => values.filter(known).reduce((a, b) => a + b, 0);
const shortened = t => t.length <= 600 ? t : t.slice(0, 600) + '...';
// Lines may end after the slashes and underscores of a path.
const breakable = path => (path.match(/[^/_]+[/_]*|[/_]+/g) ?? []).flatMap(part => [part, el('wbr')]);
// "./": a name such as "a:b" would be another protocol.
const link = (address, ...children) => Object.assign(el('a', ...children), {href: './' + address});

// ---- What sections are made of ----

const note = (...children) => el('p.note', ...children);
const section = (title, above, ...body) => el('section', el('h2', title), above && note(above), ...body);
// The numbers that a reader looks for first: [value, what it is].
const tiles = values =>
  el('div.tiles', values.filter(Boolean).map(([value, label]) => el('div.tile', el('b', value), el('span', label))));
function swatch({color, box}) {
  const i = el(box ? 'i.box' : 'i');
  i.style.background = /^(var\(--[\w-]+\)|#[0-9a-f]{6})$/i.test(color) ? color : '';
  return i;
}
// Entries: {color, name, more, box: a square in place of a stroke}.
const legend = entries => entries.length > 0
  && el('div.legend', entries.map(e => el('span', swatch(e), e.name, e.more && [' ', el('em', e.more)])));
function meter(part, color) {
  const i = el('i');
  i.style.cssText = `width:${100 * Math.min(1, Math.max(0, part || 0))}%;background:${color}`;
  return el('span.meter', i);
}
// Bars of stacked pieces {value, color, title} between a name and a text.
function bars(rows, whole = Math.max(...rows.map(r => sum(r.pieces.map(p => p.value))))) {
  return el(rows.length > 16 ? 'div.bars.many' : 'div.bars', rows.map(({name, pieces, text}) => {
    const filled = pieces.filter(p => p.value > 0), bar = el('div.bar', filled.map(p => {
      const piece = el('div');
      piece.style.cssText = `width:${100 * p.value / sum(filled.map(q => q.value))}%;background:${p.color}`;
      piece.title = visible(p.title ?? '');
      return piece;
    }));
    bar.style.width = `${whole > 0 ? 100 * sum(filled.map(p => p.value)) / whole : 0}%`;
    return [el('span', name), el('div.track', bar), el('span', text)];
  }));
}
// Columns: [title, value of a row, what is shown of the value and the row]; those with a title sort
// their rows by the value. The first of several names its row where it has none.
function table(columns, rows, kind = '') {
  const titles = columns.some(([title]) => title), names = columns.length > 1 && !columns[0][0] && !columns[0][2];
  const cell = (row, [, value, show], i) => {
    const v = value(row), e = el(names && i === 0 ? 'th' : 'td', show ? show(v, row) : v);
    e.value = v;
    return e;
  };
  const body = el('tbody', rows.map(row => el('tr', columns.map((c, i) => cell(row, c, i)))));
  const head = el('tr', columns.map(([title, , , fixed], i) => {
    const button = el('button', title), th = el('th', fixed ? title : title && button);
    button.addEventListener('click', () => {
      const up = th.getAttribute('aria-sort') !== 'ascending';
      for (const other of head.cells) other.removeAttribute('aria-sort');
      th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const unknown = v => v === '' || v === null || v === undefined || Number.isNaN(v);
      body.append(...[...body.rows].sort((a, b) => {
        const x = a.cells[i].value, y = b.cells[i].value;
        if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);  // the unknown come last
        const apart = known(x) && known(y) ? x - y : String(x).localeCompare(y, undefined, {numeric: true});
        return up ? apart : -apart;
      }));
    });
    return th;
  }));
  return el('div.scroll', el('table' + kind, titles && el('thead', head), body));
}
const facts = (title, pairs) => section(title, '', table([['', f => f[0]], ['', f => f[1]]], pairs));
// Lines of text, and how many more are elsewhere.
const lines = (title, above, of, more) => list(of).length > 0 &&
  section(title, above, table([['', l => l]], of), more && note(more));

// "failed (exit code 3)".
function stateText(s) {
  if (s.state === 'silent') return `no sign of life since ${new Date(1000 * s.updated).toLocaleString()}`;
  return s.state === 'stopped' ? 'stopped early' : s.state === 'failed' ? `failed (exit code ${s.exit_code})`
    : s.state;
}
// How a job's last start ended, unless it goes on or has finished, and its warnings.
function statusSections(s, of = '') {
  const bad = s.state === 'failed' || s.state === 'stopped' || s.error || s.reason;
  return [
    bad && section('State' + of, '', swatch({color: 'var(--part4)', box: true}), stateText(s),
      note(s.error ?? s.reason)),
    list(s.last_lines).length > 0 && section('What the last start took' + of, '',
      el('pre', list(s.last_lines).map(text).join('\n'))),
    lines('Warnings' + of, 'From rank 0\'s last start, oldest first.', s.warnings),
    lines('Warnings of earlier starts' + of, 'The last of each kind, of rank 0.', s.earlier_warnings)];
}

// ---- Pictures and clips ----

// What plays by itself while it is in view, without its controls, which would cover a small clip.
const inView = new IntersectionObserver(entries => entries.forEach(e => {
  if (e.isIntersecting) e.target.play().catch(() => {}); else e.target.pause();
}));
function video(data, sound) {
  const v = Object.assign(el('video'), {src: data, controls: true, playsInline: true, muted: !sound, loop: !sound});
  if (sound || matchMedia('(prefers-reduced-motion: reduce)').matches) return v;
  inView.observe(v);
  v.controls = false;
  for (const [event, shown] of [['pointerenter', true], ['pointerleave', false]]) v.addEventListener(event,
    () => { v.controls = shown; });
  return v;
}
// Media: what Embedder::media made of a file. `about`: head (bold), caption, alt, sound, wide.
function figure(media, about) {
  let shown;
  if (media.lost !== undefined) shown = el('div.linked', `${media.lost} cannot be read`);
  else if (media.link !== undefined)
    shown = el('div.linked',
      el('span', `${(media.bytes / 1e6).toFixed(1)} MB, not in this page:`, el('br'), link(media.link, media.name)));
  else if (media.data.startsWith('data:video/')) shown = video(media.data, about.sound);
  else shown = Object.assign(el('img'), {src: media.data, alt: visible(about.alt ?? about.head ?? '')});
  const f = el(about.wide ? 'figure.wide' : 'figure', shown,
    el('figcaption', about.head && el('b', about.head), about.caption));
  // Wide pictures want the width of the page.
  shown.addEventListener('load', () => { if (shown.naturalWidth > 2 * shown.naturalHeight) f.className = 'wide'; });
  return f;
}
const pictures = (above, wide, colours) => page.pictures.length > 0
  && section('Pictures', above, colours, el('div.media',
  page.pictures.map(p => figure(p.media, {alt: p.name, caption: `${p.name} (${p.file})`, wide}))));

// ---- Training runs ----

const parts = [['compute', 'compute'], ['wait_slowest', 'wait for the slowest'],
  ['comm_exposed', 'exposed communication'],
  ['optimizer', 'optimizer'], ['data_wait', 'data wait'], ['checkpoint', 'checkpoint'], ['other', 'other']]
  .map(([key, name], i) => ({key, name, column: 'split/' + key, color: `var(--part${i})`}));
const none = {y: [], known: 0, total: 0};
const columnOf = (run, name) => Object.hasOwn(run.steps.columns, name) ? run.steps.columns[name] : none;
const has = (run, name) => columnOf(run, name).known > 0;
const samplesASecond = run => run.samples_seen / columnOf(run, 'seconds').total;

// Charts of columns over the steps, a curve for each run. Members of the frame (chart.js), and:
// column; name: of the curve where there is one run; of: for "one" run or for "several" alone; small:
// three in a row; average: over neighbouring steps; each: every step too, thin, or their range; held:
// the held-out losses too; time: over the time in steps; more: other columns of one run.
const charts = {
  loss: {title: 'Loss', column: 'loss', y: 'loss', height: 330, log: true, average: true, each: true, held: true},
  time: {title: 'Loss over time', column: 'loss', y: 'loss', of: 'several', log: true, average: true, time: true,
    note: 'Averaged over neighbouring steps; time in steps alone.'},
  memory: {title: 'Memory of rank 0', column: 'memory/resident_bytes', y: 'memory', unit: 'bytes', zero: true,
    small: true, name: 'resident',
    more: {'memory/arena_peak_bytes': 'activations'}},
  gradient: {title: 'Gradient norm', column: 'grad_norm', y: 'norm', log: true, small: true},
  rate: {title: 'Learning rate', column: 'lr', y: 'rate', unit: 'power', zero: true, small: true},
  spread: {column: 'spread', y: 'spread of ranks', unit: '%', height: 210, zero: true, average: true, each: true,
    name: 'spread'},
  seconds: {column: 'seconds', y: 'time a step', unit: 's', zero: true, log: true},
};

// Seconds in steps until each point of the run's curves.
function timeOf(run) {
  let time = 0;
  const {x, count} = run.steps, y = columnOf(run, 'seconds').y;
  return x.map((_, i) =>
    time += (y[i] ?? 0) * (Math.floor(count * (i + 1) / x.length) - Math.floor(count * i / x.length)));
}
// The curves of a chart, and what its legend says of them.
function curvesOf(chart, runs) {
  const curves = [], entries = [], thin = [];
  const add = (run, column, name, color) => {
    const c = columnOf(run, column), x = chart.time ? timeOf(run) : run.steps.x;
    if (!c.known) return;
    if (chart.each) thin.push(c.low ? {x, y: c.y, low: c.low, high: c.high, width: 0, color}
      : {x, y: c.y, width: 1, opacity: runs.length > 1 ? 0.25 : 0.38, color});
    curves.push({name, color, x, y: chart.average ? smooth(c.y) : c.y, width: chart.average ? 2.4 : 1.8});
    entries.push({name, color});
  };
  runs.forEach((run, i) => {
    const held = chart.held && run.held_out, several = runs.length > 1;
    add(run, chart.column, several ? run.name : chart.name ?? run.name, color(chart.color ?? i));
    if (held && entries.length) entries.at(-1).name = several ? `${run.name}, training` : 'training';
    if (held) {
      const own = color(runs.length + i);
      curves.push({name: `${run.name} held out`, color: own, x: run.held_out.x, y: run.held_out.y, width: 2.4});
      entries.push({name: several ? `${run.name}, held out` : 'held out', color: own});
    }
    if (!several) Object.entries(chart.more ?? {}).forEach(([column, name], k) =>
      add(run, column, name, color(k + 1)));
  });
  return {curves: [...thin, ...curves], entries};
}
function stepChart(frame, runs, {curves, entries} = curvesOf(frame, runs)) {
  const one = runs.length === 1;
  return [entries.length > 1 && legend(entries),
    chart({x: frame.time ? 'time' : 'step', xUnit: frame.time && 's', whole: !frame.time,
    restarts: one && !frame.time ? runs[0].restarts : [], ...frame, ...(frame.small && {height: 250})}, curves)];
}
function chartSection(frame, runs) {
  if (!runs.some(r => has(r, frame.column)) || (frame.of === 'several' && runs.length < 2)) return null;
  let above = frame.note ?? '';
  if (frame.held) {
    above = runs.some(r => columnOf(r, 'loss').low)
      ? 'Shaded: the range of all steps. Line: average over neighbouring steps.'
      : 'Thin: every step. Bold: average over neighbouring steps.';
    if (runs.length === 1 && runs[0].restarts.length) above += ' Dotted: where the run was resumed.';
  }
  return section(frame.title, above, stepChart(frame, runs));
}
const small = sections => el('div.small', sections);
// NAME of each column before NAME after.
const namesOf = (run, before, after) => Object.keys(run.steps.columns)
  .filter(c => c.startsWith(before) && c.endsWith(after) && c.length > before.length + after.length)
  .map(c => c.slice(before.length, c.length - after.length));

// A chart each: terms differ by orders of magnitude, and there are more of them than colours.
function terms([run, other]) {
  const names = other ? [] : namesOf(run, 'terms/', '');
  if (!names.length) return null;
  const of = name => columnOf(run, 'terms/' + name), constant = names.filter(n => of(n).least === of(n).greatest);
  const drawn = names.filter(n => !constant.includes(n));
  return [section('Terms', 'Other figures that the training reports, averaged over neighbouring steps.'
    + (constant.length ? ' Constant: ' + constant.map(n => `${n} = ${short(of(n).least)}`).join(', ') : '')),
  drawn.length > 0 && small(drawn.map(n =>
    chartSection({title: n, column: 'terms/' + n, name: n, y: 'value', log: true, average: true, small: true},
    [run])))];
}
function stores([run, other]) {
  const names = other ? [] : namesOf(run, 'stores/', '/samples'),
    samples = n => columnOf(run, `stores/${n}/samples`).total;
  if (!names.length) return null;
  const made = names.map((n, i) => curvesOf({column: `stores/${n}/loss`, name: n, color: i, average: true}, [run]));
  const entries = names.map((name, i) =>
    ({name, color: color(i), more: `${percent(samples(name), sum(names.map(samples)))} of the samples`}));
  return section('Loss of each store', 'Averaged over neighbouring steps.',
    stepChart({y: 'loss', log: true}, [run], {curves: made.flatMap(m => m.curves), entries}),
    names.length === 1 && legend(entries));
}

// One run: stacked columns over the steps; without a split in the metrics the whole alone. Several:
// stacks cannot be overlaid, so curves of the whole and a bar for each run.
function stepTime(runs) {
  if (!runs.some(r => has(r, 'seconds'))) return null;
  const [run] = runs, mean = (r, column) => columnOf(r, column).total / r.steps.count;
  const pieces = r => parts.map(p => {
    const value = mean(r, p.column);
    return {value, color: p.color, title: `${p.name} ${percent(value, mean(r, 'seconds'))}`};
  });
  if (runs.length > 1)
    return section('Step time', 'Above: every step. Below: the mean of all steps, by what took it.',
      stepChart(charts.seconds, runs), legend(parts.map(p => ({...p, box: true}))),
      bars(runs.map(r => ({name: r.name, pieces: pieces(r), text: `${seconds(mean(r, 'seconds'))} a step`}))));
  const shown = parts.filter(p => has(run, p.column)), {count, x} = run.steps;
  const layers = (shown.length ? shown : [{name: 'step', column: 'seconds', color: parts[0].color}])
    .map(p => ({name: p.name, color: p.color, x, y: columnOf(run, p.column).y}));
  return section('Step time', count > x.length
    ? `Where the time of a step goes on rank 0; each column is the mean of ${short(+(count / x.length).toPrecision(2))} steps.`
    : 'Where the time of a step goes, on rank 0.',
  legend(shown.map(p =>
    ({...p, box: true, more: percent(columnOf(run, p.column).total, columnOf(run, 'seconds').total)}))),
  stepChart({y: 'time a step', unit: 's', height: 300, zero: true}, runs, {curves: stacked(layers), entries: []}));
}
// Efficiency against the run with the fewest ranks, if numbers of ranks differ.
function speed(runs) {
  const fast = runs.filter(r => samplesASecond(r) > 0), counts = fast.filter(r => r.ranks_number > 0);
  if (runs.length < 2 || !fast.length) return null;
  const [base] = [...counts].sort((a, b) => a.ranks_number - b.ranks_number);
  const differ = counts.some(r => r.ranks_number !== base.ranks_number);
  const each = r => samplesASecond(r) / r.ranks_number;
  const told = r => [
    fast.includes(r) ? `${rate(samplesASecond(r))} samples a second` : '-',
    r.ranks_number > 0 && counted(r.ranks_number, 'rank'),
    differ && counts.includes(r) && `efficiency ${percent(each(r), each(base))}`].filter(Boolean).join(', ');
  return section('Speed', differ ? `Efficiency: samples a second for each rank, against the run ${base.name}.`
    : 'Samples a second of time in steps.',
  bars(runs.map((r, i) => ({name: r.name, pieces: [{value: samplesASecond(r), color: color(i)}], text: told(r)}))));
}

// Ranks report their work and their wait for the slowest; what is left of the step is divided as on
// rank 0, because all ranks communicate, update and save together.
function ranks(run, of) {
  const t = run.ranks;
  if (!t) return null;
  const common = ['comm_exposed', 'optimizer', 'checkpoint', 'other'], own = p => t.own['split/' + p] ?? 0;
  const all = sum(common.map(own));
  const split = t.busy.map((busy, r) => {
    const data = Math.min(t.data_wait[r] ?? 0, busy), wait = t.wait[r] ?? 0;
    const rest = Math.max(0, t.own.seconds - busy - wait);
    return {compute: busy - data, data_wait: data, wait_slowest: wait,
      ...Object.fromEntries(common.map(p => [p, all > 0 ? rest * own(p) / all : 0]))};
  });
  const often = Object.entries(t.slowest).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const name = p => p.key === 'compute' && !t.data_wait.length ? 'compute, with the wait for clips' : p.name;
  const shown = parts.filter(p => split.some(s => s[p.key] > 0));
  return section('Ranks' + of,
    `The mean of ${grouped(t.steps)} steps. What a rank shares with all others (communication, optimizer, checkpoint) `
    + 'is divided as on rank 0. Spread: how much longer the slowest rank was busy than the average.',
    legend(shown.map(p => ({...p, name: name(p), box: true}))),
    bars(split.map((s, r) => ({
      name: t.each ? `rank ${r}` : ['fastest', 'median', 'slowest'][r],
      pieces: shown.map(p => ({value: s[p.key], color: p.color, title: `${p.name}: ${seconds(s[p.key])}`})),
      text: `busy ${seconds(t.busy[r])}`
        + (t.each ? `, slowest in ${percent(t.slowest[r] ?? 0, t.steps)} of steps` : '')}))),
    !t.each && note('Most often the slowest: '
      + often.map(([rank, n]) => `rank ${rank} in ${percent(n, t.steps)}`).join(', ') + ' of the steps.'),
    has(run, 'spread') && [el('h3', 'Spread'), stepChart(charts.spread, [run])]);
}
function memoryPlan(run, of) {
  const plan = Object.entries(object(run.facts.memory_plan)).filter(([, bytes]) => known(bytes));
  if (!plan.length) return null;
  const planned = sum(plan.map(p => p[1])), at = plan.findIndex(([kind]) => kind === 'activations');
  const resident = columnOf(run, 'memory/resident_bytes').greatest;
  const arena = columnOf(run, 'memory/arena_peak_bytes').greatest;
  const pieces = plan.map(([kind, value], i) => {
    const name = `${kind} ${bytes(value)}`;
    return {value, color: color(i), name, title: name, box: true};
  });
  const one = (name, value, color, more = '') => ({name, pieces: [{value, color}], text: bytes(value) + more});
  const rows = [{name: 'planned, a rank', pieces, text: bytes(planned)}];
  if (at >= 0 && known(arena)) {
    const more = 100 * (arena / plan[at][1] - 1);
    rows.push(one('activations, planned', plan[at][1], pieces[at].color),
      one('activations, peak', arena, color(7), ` (${more >= 0 ? '+' : ''}${more.toFixed(1)} %)`));
  }
  if (known(resident)) rows.push(one('process, peak', resident, color(7)));
  return section('Memory against its plan' + of,
    'Rank 0. The process also holds the program, its libraries, clips read ahead and the copy of a checkpoint that is '
    + 'being written; on a GPU it is what the host holds.', legend(pieces), bars(rows));
}
// Rank counts usually double, so their logarithms are evenly spaced.
function scaling(results) {
  if (!results.length) return null;
  const name = r => [r.mode, r.mix].filter(Boolean).join(', ') || 'efficiency';
  const counts = [...new Set(results.flatMap(r => r.points.map(p => p.ranks)))].sort((a, b) => a - b);
  const curves = results.flatMap((r, i) => {
    const c = {name: name(r), color: color(i), x: r.points.map(p => Math.log2(p.ranks)),
      y: r.points.map(p => p.efficiency), width: 2.4};
    return [c, {...c, name: '', width: 7, dots: true}];
  });
  const ofStep = value => percent(value);
  return section('Scaling',
    'Efficiency against the smallest number of ranks, as weft bench scaling measured it. The axis does not begin at 0.',
    legend(curves.filter(c => c.name)),
    chart({x: 'ranks', y: 'efficiency', unit: '%', labels: counts.map(n => [Math.log2(n), grouped(n)])}, curves),
    table([['case', p => p.name], ['ranks', p => p.ranks, grouped], ['a step', p => p.seconds, seconds],
      ['efficiency', p => p.efficiency, e => `${(100 * e).toFixed(1)} %`],
      ['exposed communication', p => p.exposed / p.seconds, ofStep],
      ['wait for the slowest', p => p.wait / p.seconds, ofStep]],
    results.flatMap(r => r.points.map(p => ({...p, name: name(r)})))));
}

// The few numbers that a reader looks for first.
function runTiles(r) {
  const c = name => columnOf(r, name), t = r.ranks, step = t?.own.seconds;
  const wait = t && (t.each ? sum(t.wait) / t.wait.length : t.wait[1]);
  return tiles([
    [grouped(r.steps.last), 'steps done'],
    [loss(r.last_loss), `loss, from ${loss(c('loss').first)}`],
    known(r.held_out?.last) && [loss(r.held_out.last), `held-out loss, best ${loss(r.held_out.best)}`],
    [seconds(c('seconds').median), 'median step'],
    r.samples_seen > 0 && [rate(samplesASecond(r)), 'samples a second'],
    has(r, 'split/data_wait')
      && [percent(c('split/data_wait').total, c('seconds').total), 'of the time waiting for data'],
    t && [percent(wait, step), `waiting for the slowest, ${t.each ? 'mean' : 'median'} of the ranks `
      + `(${percent(Math.min(...t.wait), step)} to ${percent(Math.max(...t.wait), step)})`],
    has(r, 'memory/resident_bytes') && [bytes(c('memory/resident_bytes').greatest), 'resident at most, rank 0']]);
}
// What the metrics say, then what the run said when it started.
function factsOf(r) {
  const c = name => columnOf(r, name), s = r.steps;
  return [
    ['steps', s.count === s.last ? grouped(s.last) : `${grouped(s.count)} recorded, to step ${grouped(s.last)}`],
    ['loss', `${loss(c('loss').first)} at the first step, ${loss(r.last_loss)} at the end `
      + '(mean of the last tenth, up to 50 steps)'],
    ['time in steps', seconds(c('seconds').total)],
    ['median step', seconds(c('seconds').median)],
    r.samples_seen > 0 && ['samples seen', `${grouped(r.samples_seen)}, ${grouped(r.distinct_samples)} different ones, `
      + `${rate(samplesASecond(r))} a second`],
    r.restarts.length > 0 && ['resumed after step', r.restarts.map(grouped).join(', ')],
    r.repeated_steps > 0 && ['steps done again', `${r.repeated_steps}, after a restart`],
    r.broken_lines > 0 && ['unreadable lines', `${r.broken_lines} of metrics.jsonl`],
    ...Object.entries(r.facts).filter(([key]) => key !== 'memory_plan')
      .map(([key, v]) => [key, typeof v === 'string' ? v : JSON.stringify(v)])].filter(Boolean);
}
// A column for each run.
function runFacts(runs) {
  if (!runs.length) return null;
  const of = runs.map(r => new Map(factsOf(r))), keys = [...new Set(of.flatMap(f => [...f.keys()]))];
  const column = (f, i) => [runs.length > 1 ? runs[i].name : '', key => f.get(key) ?? '-', null, true];
  return section('Facts', '', table([['', key => key], ...of.map(column)], keys, runs.length > 1 ? '.beside' : ''));
}
function samples(run, of) {
  return [
    run.through_time.length > 0 && section('Samples through time' + of, 'From RUN/samples, a folder a checkpoint.',
      clipsBeside(run.through_time)),
    run.samples.clips.length > 0 && section('Samples' + of, '', clips(run.samples))];
}
function training({runs, scaling: results}) {
  const of = r => runs.length > 1 ? ` of ${r.name}` : '';
  return [
    runs.length === 1 && runTiles(runs[0]),
    runs.map(r => statusSections(r.status, of(r))),
    chartSection(charts.loss, runs),
    chartSection(charts.time, runs),
    runs.length > 0 && [terms(runs), stores(runs), stepTime(runs), speed(runs)],
    runs.map(r => ranks(r, of(r))),
    small(Object.values(charts).filter(c => c.small).map(c => chartSection(c, runs))),
    runs.map(r => memoryPlan(r, of(r))),
    scaling(results),
    runs.map(r => samples(r, of(r))),
    runFacts(runs),
    runs.map(r => r.deck && el('section', el('details', el('summary', 'Deck' + of(r)), el('pre', r.deck))))];
}

// ---- Clips and pictures that jobs have made ----

// What a caption says of a clip: its line of the manifest. Several samples of a prompt, whose names
// carry the sample's number, all have one seed.
const captions = [
  l => text(l.picture) && `picture ${l.picture}`,
  l => text(l.speech) && `speech ${l.speech}`,
  (l, name) => text(l.seed)
    && (text(l.sample) && name.endsWith('-' + l.sample) ? `clip ${l.sample} of seed ${l.seed}` : `seed ${l.seed}`),
  l => text(l.psnr) && `PSNR ${text(l.psnr)} dB`,
  l => text(l.ssim) && `SSIM ${text(l.ssim)}`,
  l => text(l.height) && text(l.width) && `${l.width} x ${l.height}`,
  l => text(l.frames) && l.frames !== 1 && `${l.frames} frames`,
  l => list(l.shares).slice(0, 3).map(s => `${text(object(s).name)} ${percent(object(s).share)}`).join(' · '),
  l => known(l.seconds) && seconds(l.seconds),
  l => text(l.rank) && `${text(l.rank).includes(',') ? 'ranks' : 'rank'} ${l.rank}`,
  l => text(l.marked) && `with watermark ${l.marked}`];
const captionOf = c => captions.map(caption => caption(c.line, c.name)).filter(Boolean);
// What it was made from; may be ''.
const sourceOf = (g, c) => g.command === 'reconstruct'
  ? `left: ${text(c.line.input)}, right: through the VAE and back`
  : text(g.command === 'segment' ? c.line.input : c.line.prompt);
const made = (g, c, head, more = []) => figure(c.media,
  {head, alt: c.name, caption: [...more, ...captionOf(c)].join(' · '), sound: g.command === 'animate'});
// weft animate names the files for what they are: NAME-picture.png.
const references = (g, c, of) => c.references.map(({file, media}, i) => {
  const what = g.command !== 'animate' ? `reference ${i}` : /-ref_pose\./.test(file) ? 'head motion'
    : /-ref_eyeblink\./.test(file) ? 'eyes and expression' : 'picture';
  return figure(media, {head: what, caption: `of ${of}`});
});
const more = g => g.count > g.clips.length && note(`and ${grouped(g.count - g.clips.length)} more in ${g.folder}`);

function clips(g) {
  return [el('div.media', g.clips.map(c => {
    const source = sourceOf(g, c), clip = made(g, c, shortened(source || c.name), source ? [c.name] : []);
    return c.references.length ? el('div.sources', references(g, c, c.name), clip) : clip;
  })), more(g)];
}
// Clips of the same name in a row. They may show different prompts.
function clipsBeside(galleries) {
  const rows = new Map();
  for (const g of galleries) for (const c of g.clips) rows.set(c.name, [...rows.get(c.name) ?? [], [g, c]]);
  return [[...rows].map(([name, row]) => {
    const source = sourceOf(...row[0]), alike = row.every(([g, c]) => sourceOf(g, c) === source);
    const below = row.flatMap(([g, c]) => references(g, c, g.name));  // the clips are to be compared
    const figures = row.map(([g, c]) => made(g, c, alike ? g.name : `${g.name}: ${shortened(sourceOf(g, c))}`));
    return [el('h3', source && alike ? `${name}: ${shortened(source)}` : name),
      el('div.media', figures, below.length > 0 && el('div.sources', below))];
  }), galleries.map(more)];
}
const failures = (title, g) => lines(title, 'Run the same command to retry them.', list(g.failures).map(shortened),
  g.failed > g.failures.length && `and ${g.failed - g.failures.length} more in ${g.folder}`);
function gallery({galleries}) {
  if (galleries.length > 1)
    return [
      galleries.map(g => [failures(`Failed in ${g.name}`, g), statusSections(g.status, ` of ${g.name}`)]),
      section('Clips', 'Clips of the same name are shown side by side.', clipsBeside(galleries)),
      tooLarge(galleries)];
  const [g] = galleries, noun = g.command === 'segment' ? 'input' : 'clip', animated = g.command === 'animate';
  const work = list(g.ranks).map(object), wall = Math.max(0, ...work.map(r => r.last_end).filter(known));
  const done = r => [r.clips, r.parts, r.inputs].find(n => n > 0) ?? 0;
  const shares = g.clips.flatMap(c => list(c.line.shares).map(object));
  const colours = new Map(shares.map(s => [text(s.name), text(s.colour)]));
  return [
    tiles([
      counted(g.count, noun).split(' '),
      g.failed > 0 && [g.failed, 'failed'],
      known(g.seconds) && [seconds(g.seconds), animated ? 'of ranks\' work a clip (median)' : 'a clip (median)'],
      work.length > 0 && counted(work.length, 'rank').split(' '),
      wall > 0 && [seconds(wall), 'until the last was made']]),
    failures('Failed', g),
    statusSections(g.status),
    section(noun === 'input' ? 'Pictures and clips' : 'Clips', '',
      legend([...colours].map(([name, color]) => ({name, color, box: true}))), clips(g)),
    work.length > 1 && wall > 0 && section('Ranks',
      'How long each was at work, of the time until the last item was made.',
      bars(work.map((r, i) => ({
        name: `rank ${i}`,
        pieces: [{value: r.busy, color: color(0), title: `busy ${seconds(r.busy)}`}],
        text: `${counted(done(r), animated ? 'part' : noun)}, busy ${percent(r.busy || 0, wall)}`})), wall)),
    tooLarge(galleries)];
}
function tooLarge(galleries) {
  const media = galleries.flatMap(g => g.clips).flatMap(c => [c.media, ...c.references.map(r => r.media)]);
  const n = media.filter(m => m.link !== undefined).length;
  return n > 0 && el('footer',
    `Too large for this page: ${counted(n, 'file')}. Keep it in its folder for the links to work.`);
}

// ---- weft evaluate, weft score ----

const measured = i => v => [meter(v, color(i)), ' ', share(v)];
function evaluation(values, scores, above, colours) {
  const {pace, seconds_an_image: image} = page;
  const times = [[grouped(page.images), 'images'], [seconds(image.median), 'an image (median)'],
    [seconds(image.p95), 'an image (95 %)']];
  const made = pace.images > 0 ? [['pace', `${counted(pace.images, 'image')} on ${counted(pace.ranks, 'rank')} in `
    + `${seconds(pace.seconds)}: ${pace.images_a_second.toFixed(2)} images/s`]] : [];
  return [tiles([...values, ...times]), statusSections(page.status),
    facts('What was evaluated', [...page.facts, ...made]), scores, pictures(above, true, colours)];
}
function segmentation(e) {
  const there = c => c.union > 0;
  const rows = [...e.classes].sort((a, b) =>
    there(b) - there(a) || (b.labelled > 0) - (a.labelled > 0) || b.iou - a.iou);
  return evaluation([
    [share(e.mean_iou), `mean IoU of ${e.classes.length} classes`],
    e.labelled_classes < e.classes.length
      && [share(e.mean_iou_of_labelled_classes), `mean IoU of the ${e.labelled_classes} that are labelled`],
    [share(e.accuracy), 'pixel accuracy']],
  section('Classes', 'By intersection over union; classes that are not labelled anywhere come last. Found: the '
    + 'share of a class\'s pixels that are predicted as such.', table([
    ['', c => c.class, (_, c) => Object.assign(swatch({color: c.colour}), {className: 'colour'})],
    ['class', c => c.class, String],
    ['name', c => c.name],
    ['IoU', c => there(c) ? c.iou : null, v => known(v) ? measured(0)(v) : [meter(0, ''), ' -']],
    ['labelled pixels', c => c.labelled, grouped],
    ['predicted', c => c.predicted, grouped],
    ['found', c => c.labelled > 0 ? c.intersection / c.labelled : null, v => percent(v ?? NaN)]], rows)),
  'The image, its labels (black: none), the prediction, and where they differ (white).',
  legend(e.classes.filter(there).map(c => ({name: c.name, color: c.colour, box: true}))));
}
function detection(e) {
  return evaluation([
    [share(e.hmean), 'Hmean'],
    [share(e.precision), 'precision'],
    [share(e.recall), 'recall'],
    [grouped(e.regions), 'regions of text']],
  section('Scores', 'What counts if boxes below a score are left out.', table([
    ['score', s => s.score, v => v.toFixed(2)],
    ['precision', s => s.precision, measured(0)],
    ['recall', s => s.recall, measured(1)],
    ['Hmean', s => s.hmean, measured(2)],
    ['boxes', s => s.boxes, grouped],
    ['matched', s => s.matched, grouped]], e.scores)),
  'Left: the regions, green where a box matches, red where none does. Right: the boxes, green where they match '
    + 'a region, red where none. Grey ones do not count.');
}
const stages = {decode: 'decode', resize: 'resize', network: 'network', post_processing: 'post-processing'};
function score(s) {
  const scored = s.rows - s.without, f = s.feed, number = (n, label) => n > 0 && [grouped(n), label];
  const all = f && sum(Object.keys(stages).map(key => f.stages[key]));
  return [
    tiles([
      [grouped(s.rows), 'rows'],
      [percent(s.with_text, scored), 'of the scored rows have text'],
      [s.largest, 'largest count'],
      number(s.left_out, 'rows left out (score.maximum)'),
      number(s.without, 'rows without a count'),
      number(s.files_with_faults, 'files with faults'),
      f && [rate(f.frames_a_second), 'frames a second']]),
    statusSections(s.status),
    s.bins.length > 0 && section('Text regions', 'Rows by the number of text regions in their frame.',
      bars(s.bins.map(([name, n]) => ({
        name, pieces: [{value: n, color: color(0), title: counted(n, 'row')}], text: `${n} (${percent(n, scored)})`})))),
    f && section('What took the time',
      `${seconds(f.seconds)} on ${counted(f.ranks, 'rank')}, up to ${counted(f.threads, 'thread')} and `
      + `${counted(f.batch, 'frame')} at once: ${f.verdict}; ${f.waits}.`, table([
        ['stage', key => stages[key]],
        ['seconds, all ranks', key => f.stages[key], v => v.toFixed(2)],
        ['share', key => f.stages[key], v => percent(v, all)],
        ['a frame', key => f.stages[key], v => seconds(v / f.frames)]], Object.keys(stages))),
    lines('Files with faults', 'A picture that cannot be read has no count; of a broken video its first frame is scored, '
      + 'or a black one. Run the same command to retry them.', s.faults, s.files_with_faults > s.faults.length
      && `and ${s.files_with_faults - s.faults.length} more in ${s.all_faults}`),
    pictures('The frame as the network saw it, with the boxes of text regions.', false),
    facts('What was scored', s.facts)];
}

// ---- All jobs of a folder ----

const stateColor = s =>
  ({running: color(0), finished: color(2), failed: 'var(--part4)', silent: color(1)})[s] ?? color(7);
const jobColumns = [
  ['job', r => r.name, (name, r) => [
    r.page ? link(r.page, breakable(name)) : el('b', breakable(name)), el('span.note', r.job.command)]],
  ['state', r => r.job.state, (state, {job, error}) => [
    swatch({color: stateColor(state), box: true}), stateText(job),
    [job.error, job.reason, error].filter(Boolean).map(e => el('span.note', e))]],
  ['done', r => r.job.total > 0 ? r.job.done / r.job.total : 0, (v, {job}) => [
    job.total > 0 && [meter(v, stateColor(job.state)), el('br')],
    `${job.done}${job.total > 0 ? ` of ${job.total}` : ''} ${job.unit}s`,
    job.seconds_left > 0 && el('span.note', `${seconds(job.seconds_left)} left`)]],
  ['loss', r => r.loss, v => known(v) && loss(v)],
  ['curve', () => null, (_, r) => r.losses && sparkline(r.losses), true],
  ['held out', r => r.held_out, v => known(v) && loss(v)],
  ['warnings', r => r.job.warnings.length, (n, {job}) =>
    n > 0 && el('details', el('summary', n), el('ul', job.warnings.map(w => el('li', w))))],
  ['newest samples', () => null, (_, r) => el('div.shots',
    list(r.pictures).map(src => Object.assign(el('img'), {src, alt: ''}))), true],
  ['per item', r => r.seconds, v => known(v) && seconds(v)],
  ['checkpoint', r => r.job.checkpoint ?? ''],
  ['last update', r => r.job.updated, (at, {job}) => el('span.when',
    job.state === 'running' ? `${seconds(Math.round(job.seconds_since_update))} ago`
      : at > 0 ? new Date(1000 * at).toLocaleString() : '-')],
  ['ranks', r => r.job.ranks, String]];
const states = {running: 'running', failed: 'failed', silent: 'silent', stopped: 'stopped early', finished: 'finished'};
function folder({rows}) {
  const count = which => rows.filter(which).length;
  const tile = (n, label) => n > 0 && [n, label];
  return [
    tiles([
      counted(rows.length, 'job').split(' '),
      ...Object.entries(states).map(([state, label]) => tile(count(r => r.job.state === state), label)),
      tile(count(r => r.job.warnings.length > 0), 'with warnings')]),
    section('Jobs', 'A click on a column\'s title sorts by it. Loss: the mean of the last tenth of the steps, at '
      + 'most 50. An item is a step, a clip or a file; of steps it is the median.', table(jobColumns, rows, '.jobs'))];
}

const main = document.querySelector('main');
main.replaceChildren(el('header', el('h1', breakable(page.title)), page.note && el('p', page.note)));
try {
  main.append(...el('div', {training, gallery, segmentation, detection, score, folder}[page.kind](page)).childNodes);
} catch (e) {
  main.append(section('This page cannot be shown', String(e), el('pre', document.getElementById('data').textContent)));
}
