// The chart of docs/gallery.md: the coefficient c of a surrogate over the ratio r. A test compares `c` with rlkit.losses.

const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const ppo = (r, up, p) => (up ? r <= 1 + p.clip_high : r >= 1 - p.clip_low) ? r : 0;
const dual = (r, up, p) => (!up && r > p.clip_c ? 0 : ppo(r, up, p));
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function changed(r, up, p) {
  const change = p.old_prob * (r - 1);
  return (up ? change <= p.delta_high : change >= -p.delta_low) ? Math.min(r, p.max_weight) : 0;
}

function diverged(r, up, p) {
  const rest = (q) => Math.log(Math.max(1 - q, 1e-8));
  const kl = -p.old_prob * Math.log(r) + (1 - p.old_prob) * (rest(p.old_prob) - rest(p.old_prob * r));
  return (up ? kl > p.delta_high && r > 1 : kl > p.delta_low && r < 1) ? 0 : Math.min(r, p.max_weight);
}

function gate(r, up, p) {
  const s = sigmoid((up ? p.tau_pos : p.tau_neg) * (r - 1));
  return 4 * s * (1 - s) * r;
}

function gamma(r, up, p) {
  const [k, lambda] = up ? [p.k_pos, p.lambda_pos] : [p.k_neg, p.lambda_neg];
  return r ** k * Math.exp(lambda * (1 - r));
}

// name: [c(ratio, whether A > 0, arguments), the formula, {argument: [start, lowest, highest, step]}]
const CLIP = { clip_low: [0.2, 0, 1, 0.01], clip_high: [0.2, 0, 3, 0.01] };
const OLD = { old_prob: [0.1, 0.01, 0.99, 0.01] };
const FORMULAS = {
  ppo_clip: [ppo, "c = r; 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low", CLIP],
  dual_clip: [dual, "c of ppo_clip; 0 also where A < 0 and r > clip_c", { ...CLIP, clip_c: [3, 1.01, 5, 0.01] }],
  cispo: [(r, _, p) => clip(r, p.min_weight, p.max_weight), "c = clip(r, min_weight, max_weight)",
    { min_weight: [0, 0, 1, 0.01], max_weight: [2.5, 1, 5, 0.01] }],
  reinforce: [() => 1, "c = 1", {}],
  importance_sampling: [(r) => r, "c = r", {}],
  topr: [(r, up) => (up ? 1 : Math.min(r, 1)), "c = 1 where A > 0, min(r, 1) where A < 0", {}],
  aspo: [(r, up, p) => (!up ? ppo(r, up, p) : r <= 1 + p.clip_high ? Math.min(1 / r, p.max_weight) : 0),
    "c = min(1 / r, max_weight) where A > 0, 0 where r > 1 + clip_high; c of ppo_clip where A < 0",
    { ...CLIP, max_weight: [3, 1, 5, 0.01] }],
  unbounded_positive: [(r, up, p) => (up ? 1 : dual(r, up, p)), "c = 1 where A > 0; c of dual_clip where A < 0",
    { clip_low: [0.2, 0, 1, 0.01], clip_c: [3, 1.01, 5, 0.01] }],
  sapo: [gate, "c = 4 s (1 - s) r with s = sigmoid(tau (r - 1))",
    { tau_pos: [1, 0.1, 5, 0.05], tau_neg: [1.05, 0.1, 5, 0.05] }],
  icepop: [(r, _, p) => (r >= p.low && r <= p.high ? r : 0), "of icepop times reinforce: c = r where low <= r <= high, else 0",
    { low: [0.5, 0, 1, 0.01], high: [2, 1, 5, 0.01] }],
  dppo: [changed, "c = min(r, max_weight); 0 where the probability changes by more than delta in the direction of the step",
    { ...OLD, delta_low: [0.2, 0, 1, 0.01], delta_high: [0.2, 0, 1, 0.01], max_weight: [20, 1, 20, 0.1] }],
  dppo_kl: [diverged, "c = min(r, max_weight); 0 where the binary KL passes delta in the direction of the step",
    { ...OLD, delta_low: [0.05, 0, 0.5, 0.005], delta_high: [0.05, 0, 0.5, 0.005], max_weight: [20, 1, 20, 0.1] }],
  gmpo: [(r, up, p) => ((up ? Math.log(r) <= p.clip_high : Math.log(r) >= -p.clip_low) ? r : 0),
    "sequences of one token: c = r where -clip_low <= log r (A < 0), log r <= clip_high (A > 0), else 0",
    { clip_low: [0.4, 0, 2, 0.01], clip_high: [0.4, 0, 2, 0.01] }],
  vespo: [gamma, "sequences of one token: c = r^k exp(lambda (1 - r))",
    { k_pos: [2, 0.1, 5, 0.1], lambda_pos: [3, 0.1, 5, 0.1], k_neg: [3, 0.1, 5, 0.1], lambda_neg: [2, 0.1, 5, 0.1] }],
};

const WIDTH = 720, HEIGHT = 360, LEFT = 34, BOTTOM = 30, LOW = 0.1, HIGH = 10, TOP = 4;
const at = (r) => LEFT + ((WIDTH - LEFT - 10) * Math.log(r / LOW)) / Math.log(HIGH / LOW);
const level = (c) => 8 + ((HEIGHT - BOTTOM - 8) * (TOP - c)) / (TOP + 0.15);

/** The coefficient; NaN where old_prob times the ratio is no probability. */
function coefficient(name, r, up, values) {
  return (values.old_prob ?? 0) * r > 1 ? NaN : FORMULAS[name][0](r, up, values);
}

/** An SVG path of c over the ratio, broken where c jumps. */
function path(name, up, values) {
  let out = "", last = NaN;
  for (let i = 0; i <= 1200; i++) {
    const r = LOW * (HIGH / LOW) ** (i / 1200), c = coefficient(name, r, up, values);
    if (c <= TOP) out += `${Math.abs(c - last) < 0.2 ? "L" : "M"}${at(r).toFixed(1)} ${level(c).toFixed(1)}`;
    last = c <= TOP ? c : NaN;
  }
  return out;
}

function axes() {
  const lines = [0, 1, 2, 3, 4].map((c) => `<path d="M${LEFT} ${level(c)}H${WIDTH - 10}"/><text x="${LEFT - 8}" y="${level(c) + 4}" text-anchor="end">${c}</text>`);
  const ticks = [0.1, 0.25, 0.5, 1, 2, 4, 10].map((r) => `<path d="M${at(r)} 8V${level(-0.15)}"/><text x="${at(r)}" y="${HEIGHT - 6}" text-anchor="middle">${r}</text>`);
  return `<g class="grid">${lines.join("")}${ticks.join("")}</g>`;
}

function show(home) {
  home.innerHTML = `
    <p><label>Surrogate <select>${Object.keys(FORMULAS).map((name) => `<option>${name}</option>`).join("")}</select></label>
      <button type="button">Keep this curve</button></p>
    <p class="formula"></p>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="Coefficient c over the ratio">${axes()}
      <path class="kept"/><path class="kept"/><path class="up"/><path class="down"/><path class="mark"/></svg>
    <p class="axis">ratio r</p>
    <p class="said" aria-live="polite"></p>
    <div class="sliders"></div>`;
  const one = (selector) => home.querySelector(selector);
  const [kept, keptDown] = home.querySelectorAll(".kept");
  let values = {}, ratio = 1.5;

  function draw() {
    const name = one("select").value;
    one(".up").setAttribute("d", path(name, true, values));
    one(".down").setAttribute("d", path(name, false, values));
    one(".mark").setAttribute("d", `M${at(ratio)} 8V${level(-0.15)}`);
    const said = [true, false].map((up) => coefficient(name, ratio, up, values)).map((c) => (isNaN(c) ? "none" : c.toFixed(3)));
    one(".said").innerHTML = `At r = ${ratio.toFixed(2)}: <b class="up">c = ${said[0]} where A &gt; 0</b>, <b class="down">c = ${said[1]} where A &lt; 0</b>`;
  }

  function slider(label, [start, low, high, step], set) {
    const row = document.createElement("label");
    row.innerHTML = `<span>${label}</span><input type="range" name="${label}" min="${low}" max="${high}" step="${step}" value="${start}"><output>${set(start)}</output>`;
    const input = row.querySelector("input");
    input.addEventListener("input", () => {
      row.querySelector("output").value = set(Number(input.value));
      draw();
    });
    one(".sliders").append(row);
  }

  function choose() {
    const [, formula, args] = FORMULAS[one("select").value];
    values = Object.fromEntries(Object.entries(args).map(([key, [start]]) => [key, start]));
    one(".formula").textContent = formula;
    one(".sliders").replaceChildren();
    for (const [key, range] of Object.entries(args)) slider(key, range, (x) => (values[key] = x));
    slider("r, to read c", [Math.log10(ratio), -1, 1, 0.001], (x) => (ratio = 10 ** x).toFixed(2));
    draw();
  }

  one("select").addEventListener("change", choose);
  one("button").addEventListener("click", () => {
    kept.setAttribute("d", one("path.up").getAttribute("d"));
    keptDown.setAttribute("d", one("path.down").getAttribute("d"));
  });
  one("svg").addEventListener("pointermove", (event) => {
    const box = one("svg").getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    ratio = clip(LOW * (HIGH / LOW) ** ((x - LEFT) / (WIDTH - LEFT - 10)), LOW, HIGH);
    draw();
  });
  choose();
}

const home = document.getElementById("coefficients");
if (home) show(home);
