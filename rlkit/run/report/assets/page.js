// The report page. Everything that a model or the data wrote is put into the page as text nodes, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { index: null, chunks: [], zoom: null, charts: [], shown: [], at: -1, colour: "", hits: null, order: "best", range: [0, 1] };
const KINDS = { train: "training", eval_sampled: "held-out, sampled", eval_greedy: "held-out, greedy", dropped: "dropped" };
const kindName = (kind) => KINDS[kind] || kind.replace(/^eval_(sampled|greedy)_(.*)$/, "held-out $2, $1"); // of a named set
const ENDS = { stop: "by itself", length: "length limit", abort: "aborted" };
const SORTS = {
  newest: ["newest step", (g) => -g.step],
  oldest: ["oldest step", (g) => g.step],
  best: ["best reward", (g) => -g.mean],
  worst: ["worst reward", (g) => g.mean],
  spread: ["largest spread", (g) => -(g.high - g.low)],
  longest: ["longest answer", (g) => -Math.max(...g.lengths)],
  shortest: ["shortest answer", (g) => Math.min(...g.lengths)],
  changed: ["most changed since the step before", (g) => -Math.abs(g.change || 0)],
};

// ---------------------------------------------------------------- elements, texts and numbers
/** The children that there are, of nested lists. */
const present = (children) => children.flat(Infinity).filter((x) => x !== null && x !== undefined && x !== false);

/** An element with attributes, listeners (functions), styles (an object) and children: strings become text. */
function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

// what would change how other text is shown: control characters, overrides of the direction, halves of a character
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** The text with those as escapes, such as \u202e. */
const visible = (text) => String(text).replace(CONTROLS, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

/** A number for people: four digits, no trailing zeros. What is no number ("NaN") stays as it is. */
function num(x) {
  if (typeof x !== "number" || Number.isInteger(x)) return (x ?? "-").toLocaleString("en");
  return Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6 ? x.toExponential(2).replace(/\.?0+e/, "e") : (+x.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}
const short = (x) => num(typeof x === "number" ? +x.toPrecision(3) : x);
const signed = (x) => (x > 0 ? "+" : "") + short(x);
const show = (x) => (typeof x === "string" ? x : JSON.stringify(x, null, 1));

const sentence = (text) => text.replace(/^[a-z](?=[a-z]* )/, (c) => c.toUpperCase()) + ".";

/** Text in which `code` is marked as in Markdown. */
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

// ---------------------------------------------------------------- data
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** A group's prompt, gold answer and rows; its chunk is decompressed at the first use. */
async function samplesOf(group) {
  const chunk = state.chunks[group.chunk];
  chunk.rows ??= unpack(chunk.packed);
  return (await chunk.rows)[group.place];
}

async function load(blocks) {
  const index = await unpack(blocks[0]);
  index.groups = index.groups.map(([run, kind, step, row, chunk, place, title, rewards, lengths, tokens]) => {
    const numbers = rewards.filter((x) => typeof x === "number"), mean = numbers.reduce((a, b) => a + b, 0) / numbers.length;
    return { run, kind, step, row, chunk, place, title, rewards, lengths, tokens, mean, low: Math.min(...numbers), high: Math.max(...numbers) };
  });
  const before = new Map();
  for (const group of index.groups) { // in the order of their steps
    const key = [group.run, group.kind, group.row].join();
    group.others = before.get(key) ?? [];
    const last = group.others.findLast((x) => x.step < group.step);
    if (last) group.change = group.mean - last.mean;
    group.others.push(group);
    before.set(key, group.others);
  }
  state.index = index;
  state.chunks = blocks.slice(1).map((packed) => ({ packed }));
  state.hits = null;
}

// ---------------------------------------------------------------- head
function drawHead() {
  const { runs, differences } = state.index, several = runs.length > 1;
  $("title").replaceChildren(visible(runs.map((run) => run.name).join(", ")));
  const first = runs[0].facts;
  const parts = [first.Algorithm, first.Model && first.Model.split("/").filter((x) => x !== "model").pop(), first.Steps.split(",")[0] + " steps", first.Time];
  $("about").replaceChildren(several ? `${runs.length} runs beside each other` : visible(parts.filter(Boolean).join(" · ")));
  $("changes").replaceChildren(...runs.flatMap((run, i) => run.changes.slice(0, several ? 2 : 4).map((c) => tile(run, i, c, several))));
  $("notes").replaceChildren(...runs.flatMap((run) => run.notes.map((note) => h("p", { class: "note" }, visible(note)))));
  $("answers").replaceChildren(...(several || !runs[0].answers ? [] : answers(runs[0].answers)));
  $("commands").replaceChildren(...runs.flatMap((run) => [run.command && command(run, several), ...run.starts.map((start) => resumed(start, several ? `${run.name}, ` : ""))]).filter(Boolean));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.facts)))];
  const fact = (run, name) => name === "Started" && run.facts[name] ? new Date(run.facts[name] * 1000).toLocaleString() : run.facts[name];
  table($("facts"), names.map((name) => [name, ...runs.map((run) => fact(run, name))]), runs);
  const rows = Object.entries(differences), all = [...new Set(runs.flatMap((run) => Object.keys(run.args)))];
  const differing = () => h("div", { class: "scroll" }, table(h("table", { id: "differing" }), rows.map(([name, values]) => [name, ...values]), runs));
  const titles = rows.map(([name]) => name), listed = titles.slice(0, 6).join(", ") + (rows.length > 6 ? " and more" : "");
  $("differences").replaceChildren(...(several ? [rows.length ? h("details", { open: rows.length < 7 },
    h("summary", {}, `${rows.length} arguments differ: ${visible(listed)}`), differing()) : h("p", { class: "muted" }, "No argument that all runs have differs.")] : []));
  $("arguments").hidden = !all.length;
  table($("arguments").querySelector("table"), all.map((name) => [name, ...runs.map((run) => show(run.args[name] ?? null))]), runs);
}

/** A number before and after: [step, value, standard error] twice. */
function tile(run, i, { key, ends: [[from, was], [to, is, error]] }, several) {
  const about = state.index.meanings[key];
  return h("div", { class: `tile c${several ? i % 6 : ""}`, title: about ? about.meaning : "" },
    h("div", { class: "muted" }, several ? `${visible(run.name)}: ${key}` : key),
    h("div", { class: "big" }, `${num(was)} → ${num(is)}`, error ? h("small", {}, ` ± ${short(1.96 * error)}`) : ""),
    h("div", { class: "muted small" }, `step ${from} to ${to}`));
}

function command(run, several) {
  const title = run.starts.length ? "Started with" : "Repeat with";
  return h("div", { class: "command" }, h("span", { class: "muted" }, several ? visible(run.name) : title), copied(run.command));
}

/** A command, and the button that copies it. */
function copied(text) {
  const code = h("code", { tabindex: 0 }, visible(text));
  const copy = h("button", { type: "button", click: async () => {
    getSelection().selectAllChildren(code);
    copy.textContent = await navigator.clipboard?.writeText(text).then(() => "Copied", () => "Selected") ?? "Selected";
  } }, "Copy");
  return [code, copy];
}

/** A later start of a run: when, what changed, and its command. */
function resumed({ step, unix, command, changed }, name) {
  const when = unix ? `, ${new Date(unix * 1000).toLocaleString()}` : "";
  const what = changed.length ? changed.flatMap(([key, old, now], i) => [i ? ", " : "", h("code", {}, visible(key)), ` ${visible(old)} → ${visible(now)}`]) : ["nothing changed"];
  return h("details", { class: "command resumed" },
    h("summary", {}, h("span", { class: "muted" }, `${visible(name)}resumed after step ${step}${when}: `), what), command ? h("div", { class: "row" }, copied(command)) : null);
}

/** Held-out prompts with their answers at the first and at the last evaluation, beside each other. */
function answers({ kind, steps, answers: pairs, better, worse, equal }) {
  const column = ([reward, text], i) => h("div", { class: "card" }, h("div", { class: "muted small" }, `${i ? "after" : "before"}, step ${steps[i]}: reward ${short(reward)}`),
    h("div", { class: "text", dir: "auto" }, visible(text)));
  return [h("h3", {}, `Before and after: ${kindName(kind)}`, h("small", { class: "muted" }, ` ${num(better)} prompts better, ${num(worse)} worse, ${num(equal)} equal; the first ${pairs.length}:`)),
    ...pairs.map(({ prompt, gold, ends }) => h("div", { class: "pair" },
      h("div", { class: "asked", dir: "auto" }, visible(prompt), gold === null || gold === undefined ? null : h("div", { class: "small muted" }, "gold answer ", h("b", {}, visible(show(gold))))),
      ends.map(column)))];
}

/** Fill a table: the first cell of a row is its title, the others are one of each run. */
function table(element, rows, runs) {
  const head = runs.length > 1 ? [h("tr", {}, h("td"), runs.map((run, i) => h("th", { class: `c${i % 6}`, scope: "col" }, visible(run.name))))] : [];
  element.replaceChildren(...head, ...rows.map(([title, ...cells]) =>
    h("tr", {}, h("th", { scope: "row" }, visible(title)), cells.map((cell) => h("td", {}, cell === null || cell === undefined ? "-" : visible(cell))))));
  return element;
}

// ---------------------------------------------------------------- curves
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Centred running mean over `window` values; missing ones are left out, and stay missing. */
function smooth(y, window) {
  const half = Math.floor(window / 2), sum = [0], count = [0];
  y.forEach((x, i) => { sum.push(sum[i] + (x ?? 0)); count.push(count[i] + (x === null ? 0 : 1)); });
  return y.map((x, i) => {
    const low = Math.max(i - half, 0), high = Math.min(i + half + 1, y.length);
    return x === null ? null : (sum[high] - sum[low]) / (count[high] - count[low]);
  });
}

/** What a panel draws: {run, curve, name, colour, dash, x, y, error}, one for each run and curve that was measured. */
function linesOf(panel) {
  const { runs } = state.index, several = runs.length > 1, lines = [];
  runs.forEach((run, i) => panel.curves.forEach((curve, j) => {
    const found = run.series[curve.key];
    if (!found || (several && curve.raw && panel.curves.length > 1)) return;
    const error = run.series[curve.key + "_se"], at = error && new Map(error[0].map((step, k) => [step, error[1][k]]));
    lines.push({
      curve, x: found[0], y: found[1], error: at && found[0].map((step) => at.get(step) ?? null),
      name: several ? `${run.name}, ${curve.label}` : curve.label,
      colour: css(`--c${(several ? i : j) % 6}`), dash: several && j ? [[6, 4], [2, 3], [8, 3, 2, 3]][(j - 1) % 3] : [],
    });
  }));
  return lines;
}

function drawCurves(width) {
  state.charts.forEach((chart) => chart.destroy());
  state.charts = [];
  const quiet = [], cards = [], steps = state.index.runs.flatMap((run) => Object.values(run.series)).flatMap(([x]) => [x[0], x.at(-1)]);
  state.span = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)]; // of all charts, so that they line up
  for (const panel of state.index.panels) {
    const lines = linesOf(panel);
    if (lines.every((line) => line.y.every((y) => y === 0))) quiet.push(panel.title.toLowerCase());
    else cards.push(card(panel, lines));
  }
  $("panels").replaceChildren(...cards);
  const changed = state.index.runs.some((run) => run.starts.some((start) => start.changed.length));
  $("marks").hidden = !changed;
  $("quiet").textContent = quiet.length ? `0 at every step: ${visible(quiet.join(", "))}.` : cards.length ? "" : "No finished step yet.";
  for (const element of cards) element.draw(width);
}

/** The card of a panel: title, chart, legend, meaning. `draw(width)` makes its chart. */
function card(panel, lines) {
  const ends = lines.map((l) => `${visible(l.name)} from ${num(l.y[0])} to ${num(l.y.at(-1))}`).join("; ");
  const box = h("div", { class: "chart", tabindex: 0, role: "img", "aria-label": `${visible(panel.title)}: ${ends}` }), legend = h("div", { class: "legend" });
  const keys = panel.curves.filter((c) => lines.some((line) => line.curve.key === c.key)).map((c) => [c, state.index.meanings[c.key]]);
  const about = keys.find(([, row]) => row)?.[1];
  const caption = about && h("details", { class: "about" },
    h("summary", {}, marked(sentence(about.meaning.split(". ")[0])), about.healthy ? [h("br"), h("b", {}, "Healthy: "), marked(about.healthy + ".")] : []),
    h("dl", {}, keys.map(([c, row]) => [h("dt", {}, h("code", {}, visible(c.key)), ` ${visible(c.label)}`), h("dd", {}, row ? marked(`${row.meaning} (${row.unit})`) : "")])));
  const element = h("article", { class: "card" }, h("h3", {}, visible(panel.title), h("small", { class: "muted" }, ` ${panel.unit}`)), box, legend, caption);
  element.draw = (width) => chartOf(panel, lines, box, legend, width ?? box.clientWidth);
  return element;
}

function chartOf(panel, lines, box, legend, width) {
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const spread = (x, y) => { const out = new Array(steps.length).fill(null); x.forEach((step, i) => (out[place.get(step)] = y[i])); return out; };
  const data = [steps], series = [{}], bands = [], share = +$("smoothing").value / 100;
  for (const line of lines) {
    const add = (y, options) => series.push({ stroke: line.colour, dash: line.dash, spanGaps: true, points: { show: false }, ...options }) && data.push(spread(line.x, y));
    line.at = series.length;
    if (line.curve.sparse) add(line.y, { width: 1.5, points: { show: true, size: 5, fill: line.colour } });
    else add(line.y, { width: 1, alpha: line.curve.raw ? 0.6 : 0.3 });
    if (!line.curve.sparse && !line.curve.raw) add(smooth(line.y, share * line.y.length), { width: 2 });
    if (line.error) {
      for (const z of [1.96, -1.96]) add(line.y.map((y, i) => (y === null || line.error[i] === null ? null : y + z * line.error[i])), { width: 0 });
      bands.push({ series: [series.length - 2, series.length - 1], fill: line.colour + "22" });
    }
    line.until = series.length;
  }
  const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const values = lines.map((line) => h("span", { class: "value" }));
  const chart = new uPlot({
    width, height: 190, series, bands, legend: { show: false }, padding: [8, 10, 0, 0],
    scales: {
      x: { time: false, range: () => state.zoom ?? state.span },
      y: { range: (u, low, high) => rangeOf(panel, low, high) },
    },
    axes: [{ ...axis, size: 26, values: (u, ticks) => ticks.map((x) => (Number.isInteger(x) ? num(x) : "")) }, { ...axis, size: 54, values: (u, ticks) => ticks.map(num) }],
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 },
      bind: { dblclick: () => () => zoomTo(null) } },
    hooks: {
      drawClear: [(u) => markChanges(u)],
      setSelect: [(u) => { if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        if (u.select.width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); }],
      setCursor: [(u) => lines.forEach((line, i) => (values[i].textContent = valueAt(line, u.cursor.left >= 0 ? u.data[0][u.cursor.idx] : undefined)))],
    },
  }, data, box);
  let pressed = 0;
  chart.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  chart.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 4 && chart.cursor.idx != null) goToStep(chart.data[0][chart.cursor.idx]); });
  box.onkeydown = (event) => chartKey(event, chart);
  legend.replaceChildren(...lines.map((line, i) => h("button", {
    type: "button", "aria-pressed": "true", title: state.index.meanings[line.curve.key]?.meaning ?? "",
    click: (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", on);
      for (let k = line.at; k < line.until; k++) chart.setSeries(k, { show: on });
    },
  }, h("i", { class: "swatch", style: { borderTop: `3px ${line.dash.length ? "dashed" : "solid"} ${line.colour}` } }), visible(line.name), " ", values[i])));
  lines.forEach((line, i) => (values[i].textContent = valueAt(line, undefined)));
  state.charts.push(chart);
}

/** A dashed line at each step after which a run went on with other arguments. */
function markChanges({ ctx, bbox, scales, valToPos }) {
  ctx.save();
  ctx.strokeStyle = css("--warn");
  ctx.setLineDash([4, 4]);
  for (const { step, changed } of state.index.runs.flatMap((run) => run.starts)) {
    if (!changed.length || step < scales.x.min || step > scales.x.max) continue;
    const x = Math.round(valToPos(step, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** The value of a line at a step, with its 95% interval; the last one without a step. */
function valueAt(line, step) {
  let i = step === undefined ? line.x.length - 1 : line.x.findLastIndex((x) => x <= step);
  if (i < 0 || (!line.curve.sparse && step !== undefined && line.x[i] !== step)) return "-";
  const error = line.error?.[i];
  return num(line.y[i]) + (error ? ` ± ${short(1.96 * error)}` : "");
}

function rangeOf(panel, low, high) {
  if (low === null || high === null) return [0, 1];
  if (panel.from_zero && low >= 0) return [0, 1.08 * high || 1];
  const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function zoomTo(range) {
  state.zoom = range;
  $("unzoom").hidden = !range;
  for (const chart of state.charts) chart.setScale("x", { min: (range ?? state.span)[0], max: (range ?? state.span)[1] });
}

/** Left and right move the cursor, + and - zoom around it, Enter shows the step's samples, Escape resets the zoom. */
function chartKey(event, chart) {
  const steps = chart.data[0], now = chart.cursor.left >= 0 ? chart.cursor.idx ?? 0 : steps.length - 1;
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
  const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  if (move) {
    const next = Math.min(steps.length - 1, Math.max(0, now + move));
    chart.setCursor({ left: chart.valToPos(steps[next], "x"), top: 10 });
  } else if (factor) {
    const { min, max } = chart.scales.x, half = ((max - min) * factor) / 2, middle = steps[now];
    zoomTo(half * 2 >= steps.at(-1) - steps[0] ? null : [Math.max(steps[0], middle - half), Math.min(steps.at(-1), middle + half)]);
  } else if (event.key === "Escape") zoomTo(null);
  else if (event.key === "Enter") goToStep(steps[now]);
  else return;
  event.preventDefault();
}

/** Show the samples of the step nearest to `step`, of which there are any. */
function goToStep(step) {
  const steps = [...$("step").options].map((option) => +option.value).filter((x) => x >= 0);
  if (!steps.length) return;
  $("step").value = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  refresh();
  $("samples").scrollIntoView();
}

// ---------------------------------------------------------------- list of groups
const HEIGHT = 54; // of a row, as in page.css

function fill(select, options) {
  const before = select.options.length > 1 ? select.value : String(options[0][0]);
  select.replaceChildren(...options.map(([key, text]) => h("option", { value: key }, text)));
  select.value = options.some(([key]) => String(key) === before) ? before : options[0][0];
  select.parentElement.hidden = options.length < 2;
}

function drawControls() {
  const { groups, runs } = state.index, kinds = [...new Set([...Object.keys(KINDS), ...groups.map((g) => g.kind)])].filter((kind) => groups.some((g) => g.kind === kind));
  fill($("run"), runs.length > 1 ? [[-1, "all"], ...runs.map((run, i) => [i, visible(run.name)])] : [[-1, "all"]]);
  fill($("kind"), [...kinds.map((kind) => [kind, kindName(kind)]), ...(kinds.length === 1 ? [] : [["", "all"]])]);
  fill($("sort"), Object.entries(SORTS).map(([key, [name]]) => [key, name]));
  $("tokens").parentElement.hidden = !groups.some((g) => g.tokens);
  document.body.classList.toggle("no-samples", !groups.length);
}

const chosen = (group) => (+$("run").value < 0 || group.run === +$("run").value) && (!$("kind").value || group.kind === $("kind").value)
  && (!$("tokens").checked || group.tokens);

/** Apply the controls to the list, and open its first group unless the open one is still in it. */
function refresh() {
  const open = state.shown[state.at], some = state.index.groups.filter(chosen);
  fill($("step"), [[-1, "all"], ...[...new Set(some.map((g) => g.step))].map((step) => [step, String(step)])]);
  const step = +$("step").value, key = SORTS[$("sort").value][1];
  const found = some.filter((g) => (step < 0 || g.step === step) && (!state.hits || state.hits.has(g)));
  for (const group of found) group.key = Number.isNaN(key(group)) ? Infinity : key(group);
  state.shown = found.sort((a, b) => (a.key === b.key ? 0 : a.key - b.key));
  $("spacer").style.height = `${found.length * HEIGHT}px`;
  $("count").textContent = state.index.groups.length ? `${num(found.length)} prompts, ${num(found.flatMap((g) => g.rewards).length)} samples`
    : "This run has no samples: it trains on fixed data, or wrote none.";
  $("list").scrollTop = 0;
  const at = found.indexOf(open);
  choose(at >= 0 ? at : found.length ? Math.max(0, found.slice(0, 200).findIndex((g) => g.tokens)) : -1);
}

/** Draw the rows that are in view. */
function drawRows() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 5), last = first + Math.ceil(list.clientHeight / HEIGHT) + 10;
  $("spacer").replaceChildren(...state.shown.slice(first, last).map((group, i) => row(group, first + i)));
}

function row(group, i) {
  const [low, high] = state.range;
  const marks = [...group.rewards].sort((a, b) => b - a).filter((_, k, all) => k % Math.ceil(all.length / 16) === 0)
    .map((x) => h("i", { class: "mark", style: { opacity: typeof x === "number" ? 0.12 + (0.88 * (x - low)) / (high - low || 1) : 1 } }));
  const run = state.index.runs.length > 1 ? `${visible(state.index.runs[group.run].name)}, ` : "";
  const change = group.change ? h("span", { class: group.change > 0 ? "up" : "down" }, `${signed(group.change)} `) : null;
  return h("div", { role: "option", id: `row${i}`, class: "item", "aria-selected": String(i === state.at), style: { top: `${i * HEIGHT}px` }, click: () => choose(i, true) },
    h("div", { class: "what", dir: "auto" }, visible(group.title) || "(empty prompt)"),
    h("div", { class: "small muted" }, h("span", {}, `${run}${kindName(group.kind)}, step ${group.step} `), h("span", { class: "marks" }, marks),
      h("span", { class: "right" }, change, `reward ${short(group.mean)}`)));
}

function choose(i, scroll) {
  state.at = i;
  const list = $("list");
  if (i * HEIGHT < list.scrollTop) list.scrollTop = i * HEIGHT;
  if ((i + 1) * HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = (i + 1) * HEIGHT - list.clientHeight;
  if (i >= 0) list.setAttribute("aria-activedescendant", `row${i}`);
  drawRows();
  drawDetail(state.shown[i]).then(() => { if (scroll && innerWidth < 900) $("detail").scrollIntoView({ block: "start" }); });
}

function listKey(event) {
  const page = Math.floor($("list").clientHeight / HEIGHT), all = state.shown.length;
  const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -all, End: all }[event.key];
  if (!move || !all) return;
  event.preventDefault();
  choose(Math.min(all - 1, Math.max(0, state.at + move)));
}

let searching = 0;
async function search() {
  const wanted = $("search").value.trim().toLowerCase(), mine = ++searching;
  if (wanted) {
    $("count").textContent = "searching…";
    const hits = new Set();
    for (const group of state.index.groups) {
      const { prompt, gold, rows } = await samplesOf(group);
      const texts = [prompt, gold === null ? "" : show(gold), ...rows.map(textOf)];
      if (texts.some((text) => text.toLowerCase().includes(wanted))) hits.add(group);
      if (mine !== searching) return;
    }
    state.hits = hits;
  } else state.hits = null;
  refresh();
}

/** Mark the searched words in what is open, where the browser can. */
function highlight() {
  const wanted = $("search").value.trim().toLowerCase();
  if (window.Highlight) CSS.highlights.delete("found");
  if (!window.Highlight || !wanted) return;
  const nodes = [], ends = [], ranges = [], walker = document.createTreeWalker($("detail"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) ends.push((ends.at(-1) ?? 0) + nodes[nodes.push(walker.currentNode) - 1].length);
  const text = nodes.map((node) => node.data).join("").toLowerCase();
  const spot = (place) => { const i = ends.findIndex((end) => end > place); return [nodes[i], place - (i ? ends[i - 1] : 0)]; };
  for (let i = text.indexOf(wanted); i >= 0 && ranges.length < 500; i = text.indexOf(wanted, i + 1)) {
    const range = new Range(), [last, end] = spot(i + wanted.length - 1);
    range.setStart(...spot(i));
    range.setEnd(last, end + 1);
    ranges.push(range);
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

// ---------------------------------------------------------------- one group
const textOf = (row) => row.completion ?? (row.tokens ? row.tokens.text.join("") : "");

async function drawDetail(group) {
  if (!group) return $("detail").replaceChildren(h("p", { class: "muted" }, state.index.groups.length ? "Nothing found." : ""));
  const { prompt, gold, rows } = await samplesOf(group);
  if (group !== state.shown[state.at]) return;
  const episodes = [];
  for (const row of rows) row.continues && episodes.length ? episodes.at(-1).push(row) : episodes.push([row]);
  if (state.order === "best") episodes.sort((a, b) => (b.at(-1).reward ?? 0) - (a.at(-1).reward ?? 0));
  const streams = Object.keys(COLOURS).filter((name) => rows.some((row) => row.tokens?.[name] != null)), scale = scaleOf(rows);
  const long = prompt.length > 400 || prompt.split("\n").length > 8, legend = h("span", { class: "small" });
  const cards = h("div", { class: "cards" }, episodes.map((pieces) => sample(group, pieces, prompt)));
  const colour = h("select", { id: "colour", change: () => { state.colour = colour.value; paint(cards, legend, scale); } },
    h("option", { value: "" }, "nothing"), streams.map((name) => h("option", { value: name }, COLOURS[name].name)));
  colour.value = streams.includes(state.colour) ? state.colour : "";
  const order = h("select", { id: "order", change: () => { state.order = order.value; drawDetail(group); } },
    h("option", { value: "best" }, "best first"), h("option", { value: "sampled" }, "as sampled"));
  order.value = state.order;
  const { others } = group, range = state.index.runs[group.run].args.success_range;
  const why = Array.isArray(range) ? `its mean success is outside --success-range ${range.join(" ")}` : "keep_group rejected it";
  $("detail").replaceChildren(...present([
    h("div", { class: "row" }, h("h3", {}, `${kindName(group.kind)}, step ${group.step}`), h("span", { class: "muted" }, `row ${group.row + 1} of the data`)),
    others.length > 1 ? h("div", { class: "small" }, "The same prompt at step ", others.map((g) => h("button", { type: "button", class: "link", "aria-pressed": String(g === group), click: () => jump(g) }, `${g.step} (${short(g.mean)})`))) : null,
    h("details", { open: !long }, h("summary", {}, long ? `Prompt: ${visible(group.title)}` : "Prompt"), h("div", { class: "text", dir: "auto" }, visible(prompt))),
    gold === null || gold === undefined ? null : h("div", { class: "gold" }, h("span", { class: "muted" }, "Gold answer "), h("span", { class: "text", dir: "auto" }, visible(show(gold)))),
    group.kind === "dropped" ? h("p", { class: "note" }, `Sampled but not trained on: ${why}; mean reward ${short(group.mean)}.`) : null,
    h("div", { class: "row" },
      streams.length ? h("label", {}, "Colour tokens by ", colour) : h("span", { class: "muted small" }, state.index.groups.some((g) => g.tokens) ? "No token numbers were kept here." : ""),
      episodes.length > 1 ? h("label", {}, "Order ", order) : null, legend),
    cards]));
  paint(cards, legend, scale);
  highlight();
}

/** Open a group that the controls may hide. */
function jump(group) {
  if (!state.shown.includes(group)) {
    $("step").value = -1;
    if ($("kind").value) $("kind").value = group.kind;
    if (!group.tokens) $("tokens").checked = false;
    refresh();
  }
  choose(state.shown.indexOf(group));
}

/** The card of one episode: numbers, why it ended, and its text piece by piece. */
function sample(group, pieces, prompt) {
  const last = pieces.at(-1), parts = Object.entries(last.rewards ?? {});
  const { messages: said, ...info } = last.info ?? {}, messages = Array.isArray(said) ? said : [];
  const nan = group.kind === "train" && last.advantage === null, length = pieces.reduce((sum, row) => sum + (row.length ?? 0), 0);
  const numbers = [["reward", num(last.reward)], ...(last.advantage != null ? [["advantage", signed(last.advantage)]] : []),
    ...(last.score != null ? [["score", num(last.score)]] : []), ...parts.map(([name, x]) => [name, num(x)]),
    ["tokens", num(length)], ["weights of step", [last.versions ?? []].join(", ")], ["ended", ENDS[last.finish_reason] ?? last.finish_reason ?? ""]];
  return h("article", { class: "card sample" },
    h("dl", { class: "numbers" }, numbers.filter(([, x]) => x !== "").map(([name, x]) =>
      h("div", {}, h("dt", {}, visible(name)), h("dd", { class: name === "ended" && last.finish_reason !== "stop" ? "warn" : null }, visible(x))))),
    nan ? h("p", { class: "small warn" }, "not trained on: one of its numbers was NaN or infinite, or the step failed") : null,
    info.error ? h("p", { class: "small warn" }, "not judged: ", visible(show(info.error))) : null,
    h("div", { class: "body" }, pieces.map((row, k) => [
      k && row.prompt && row.prompt !== prompt ? h("details", { class: "small" }, h("summary", {}, "The context was written anew: prompt"), h("div", { class: "text" }, visible(row.prompt))) : null,
      row.tokens ? tokensOf(row.tokens) : messages.length > 1 && k === pieces.length - 1 ? turns(messages) : h("div", { class: "text", dir: "auto" }, visible(textOf(row))),
    ])),
    Object.keys(info).length ? h("details", { class: "small" }, h("summary", {}, "What environment and reward left"), h("pre", { class: "text" }, visible(show(info)))) : null);
}

/** The messages of an episode, folded but for the last. */
const turns = (messages) => messages.map((message, i) => {
  const { role, content, tool_calls } = message ?? {}, text = visible(show(content ?? "")), calls = [tool_calls ?? []].flat();
  return h("details", { class: "turn", open: i === messages.length - 1 },
    h("summary", {}, h("b", {}, visible(role ?? "?")), " ", text.slice(0, 80), calls.map((call) => h("i", {}, ` calls ${visible(call?.function?.name ?? "a tool")}`))),
    h("div", { class: "text", dir: "auto" }, text), calls.length ? h("pre", { class: "text" }, visible(show(calls))) : null);
});

// ---------------------------------------------------------------- tokens
const at = (stream, i) => (Array.isArray(stream) ? stream[i] : stream); // one number stands for all
const COLOURS = {
  logp: { name: "log-prob", of: (x) => ["--low", -x / 5], ends: () => ["0", "-5 nats and below"] },
  entropy: { name: "entropy", of: (x) => ["--low", x / 2.5], ends: () => ["0", "2.5 nats and above"] },
  advantage: { name: "advantage", of: (x, s) => [x < 0 ? "--down" : "--up", Math.abs(x) / (s.advantage || 1)], ends: (s) => [`-${num(s.advantage)}`, `+${num(s.advantage)}`] },
  ratio: { name: "ratio to the sampler", of: (x, s) => [x < 1 ? "--down" : "--up", x > 0 ? Math.abs(Math.log(x)) / s.ratio : 0], ends: (s) => [num(Math.exp(-s.ratio)), num(Math.exp(s.ratio))] },
  mask: { name: "trained or not", of: (x) => ["--up", x ? 0.5 : 0], ends: () => ["not trained", "trained"] },
  version: { name: "weight version", of: (x, s) => [`--c${s.versions.indexOf(x) % 6}`, x < 0 ? 0 : 0.5], ends: (s) => s.versions.map((v) => (v < 0 ? "not sampled" : `version ${v}`)) },
};

/** What the colours of a group are relative to. */
function scaleOf(rows) {
  const all = (name) => rows.flatMap((row) => row.tokens?.[name] ?? []);
  const largest = (values, low) => values.reduce((a, b) => Math.max(a, Math.abs(b)), low);
  const ratio = largest(all("ratio").filter((x) => x > 0).map(Math.log), 0.01);
  return { advantage: largest(all("advantage"), 0), ratio, versions: [...new Set(all("version"))].sort((a, b) => a - b) };
}

/** The tokens of a completion; what the policy did not sample (tools, users) is folded. */
function tokensOf(tokens) {
  const out = [], body = h("div", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys show their numbers", keydown: tokenKey });
  body.tokens = tokens;
  const own = (i) => at(tokens.version, i) >= 0; // sampled by the policy
  for (let i = 0; i < tokens.text.length; ) {
    let end = i;
    while (end < tokens.text.length && own(end) === own(i)) end++;
    const spans = tokens.text.slice(i, end).map((text, k) => h("span", { "data-i": i + k }, visible(text).replace(/\n/g, "⏎\n")));
    const text = tokens.text.slice(i, end).join("").trim().slice(0, 60).replace(/\s+/g, " ");
    out.push(...(own(i) ? spans : [h("details", { class: "turn" }, h("summary", {}, `not sampled, ${end - i} tokens: ${visible(text)}`), ...spans)]));
    i = end;
  }
  body.append(...out);
  return body;
}

const tint = (colour, amount) => `color-mix(in srgb, var(${colour}) ${Math.round(15 + 60 * Math.min(1, amount))}%, transparent)`;

/** Colour the tokens by the chosen number. */
function paint(cards, legend, scale) {
  const name = cards.parentElement?.querySelector("#colour")?.value, rule = COLOURS[name];
  for (const body of cards.querySelectorAll(".tokens")) for (const span of body.querySelectorAll("span[data-i]")) {
    const x = rule && at(body.tokens[name], +span.dataset.i);
    const [colour, amount] = rule && typeof x === "number" ? rule.of(x, scale) : ["", 0];
    span.style.background = amount > 0 ? tint(colour, amount) : "";
  }
  legend.replaceChildren();
  if (!rule) return;
  const ends = rule.ends(scale), two = name === "advantage" || name === "ratio";
  legend.append(...ends.map((text, i) => {
    const [colour] = name === "version" ? rule.of(scale.versions[i], scale) : two ? [i ? "--up" : "--down"] : rule.of(1, scale);
    return h("span", {}, h("i", { class: "mark", style: { background: tint(colour, i || two || name === "version" ? 1 : 0) } }), ` ${text} `);
  }));
}

function showTip(span) {
  document.querySelector("span.here")?.classList.remove("here");
  if (!span) return ($("tip").hidden = true);
  span.classList.add("here");
  const { tokens } = span.closest(".tokens"), i = +span.dataset.i;
  const rows = Object.keys(COLOURS).filter((name) => tokens[name] != null).map((name) => [COLOURS[name].name, num(at(tokens[name], i))]);
  const tip = $("tip"), box = span.getClientRects()[0];
  tip.replaceChildren(h("b", {}, `${i + 1}: ${visible(JSON.stringify(tokens.text[i]))}`), h("table", {}, rows.map(([name, x]) => h("tr", {}, h("td", {}, name), h("td", {}, x)))));
  tip.hidden = false;
  if (!box) return;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function tokenKey(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") return showTip(null);
  if (!move) return;
  event.preventDefault();
  const spans = [...this.querySelectorAll("span[data-i]")].filter((span) => !span.closest("details:not([open])"));
  showTip(spans[Math.min(spans.length - 1, Math.max(0, spans.findIndex((span) => span.classList.contains("here")) + move))]);
}

// ---------------------------------------------------------------- the page as a whole
function drawAll() {
  state.range = state.index.groups.filter((g) => Number.isFinite(g.mean)).reduce(([a, b], g) => [Math.min(a, g.low), Math.max(b, g.high)], [Infinity, -Infinity]);
  for (const draw of [drawHead, drawCurves, drawControls]) draw();
  return $("search").value ? search() : refresh();
}

/** Follow a live run: ask for its state, and for the data when that is not what the page shows. */
async function follow(known) {
  for (;;) {
    try {
      if (known !== await (await fetch("state")).text()) {
        const name = (g) => g && [g.run, g.kind, g.step, g.row].join(), open = name(state.shown[state.at]);
        const { state: now, blocks } = await (await fetch("data")).json();
        await load(blocks);
        [state.shown, state.at] = [state.index.groups.filter((g) => name(g) === open), 0];
        drawAll();
        known = now;
      }
      $("live").textContent = "live";
    } catch { $("live").textContent = "the server does not answer"; }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function start() {
  $("theme").onclick = () => {
    const { dataset } = document.documentElement, theme = (dataset.theme = { light: "dark", dark: "system" }[dataset.theme] ?? "light");
    $("theme").textContent = `Theme: ${theme}`;
    drawCurves();
  };
  $("unzoom").onclick = () => zoomTo(null);
  $("smoothing").onchange = () => drawCurves();
  for (const id of ["run", "kind", "step", "sort", "tokens"]) $(id).onchange = refresh;
  let typing = 0, resizing = 0, width = innerWidth;
  $("search").oninput = () => { clearTimeout(typing); typing = setTimeout(search, 200); };
  $("list").onscroll = () => requestAnimationFrame(drawRows);
  $("list").onkeydown = listKey;
  $("detail").addEventListener("mouseover", (event) => showTip(event.target.closest("span[data-i]")));
  for (const name of ["mouseleave", "focusout"]) $("detail").addEventListener(name, () => showTip(null));
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; drawCurves(); drawRows(); } }, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCurves());
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); drawCurves(320); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); drawCurves(); });
  await load([...document.querySelectorAll("script.data")].map((block) => block.textContent));
  drawAll();
  document.documentElement.dataset.ready = "yes";
  if (document.documentElement.dataset.live) { $("title").after(h("span", { id: "live", role: "status" }, "live")); follow(document.documentElement.dataset.live); }
}

start().catch((error) => { $("about").textContent = `This page needs a browser of 2023 or later (${error}).`; throw error; });
