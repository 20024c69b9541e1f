// The live view: the state of the engines, updated once a second while visible.

import { call } from "./api.js";
import { colour, histogram, lines, prepare } from "./charts.js";
import { $, count, make, seconds } from "./dom.js";

const SPAN = 120, CELL = 9;
let visible = false, timer = null;
let engines = [];
const histories = new Map();
let chosen = "", steps = [], stepAt = -1, latest = null;

export function start() {
  $("engine").addEventListener("change", redraw);
  $("hold").addEventListener("change", tick);
  addEventListener("resize", redraw);
  const canvas = $("chart-steps");
  canvas.addEventListener("pointermove", ({ offsetX }) => showStep(steps.findIndex((one) => one.x <= offsetX && offsetX <= one.x + Math.max(one.wide, 2))));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    showStep(stepAt < 0 ? steps.length - 1 : Math.max(0, Math.min(steps.length - 1, stepAt + move)));
  });
}

export function setVisible(value) {
  visible = value;
  tick();
}

async function tick() {
  clearTimeout(timer);
  if (!visible || $("hold").checked) return;
  try {
    if (!document.hidden) {
      take(await (await call("web/live", { silent: true })).json());
      redraw();
    }
  } catch (error) {
    $("live-state").textContent = `no answer: ${error.message}`;
  }
  timer = setTimeout(tick, 1000);
}

/** Add an answer to the history of each model. */
function take(answer) {
  engines = answer.models.flatMap((model) => model.engines.map((engine, i) => {
    const where = engine.address || (model.engines.length > 1 ? `engine ${i}` : "");
    return { model, engine, name: [model.name, where, engine.role].filter(Boolean).join(" · ") };
  }));
  for (const model of answer.models) {
    let history = histories.get(model.name) ?? [];
    if (history.length && history.at(-1).model.counters.requests > model.counters.requests) history = [];  // a restart
    const total = (name) => model.engines.reduce((sum, one) => sum + one.stats[name], 0);
    history.push({ time: answer.time, model, running: total("running"), waiting: total("waiting") });
    while (history[0].time < answer.time - SPAN - 1) history.shift();
    histories.set(model.name, history);
  }
  const names = engines.map((one) => one.name);
  if (names.join() !== [...$("engine").options].map((one) => one.value).join()) {
    const before = $("engine").value;
    $("engine").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(before)) $("engine").value = before;
  }
}

export function redraw() {
  const shown = engines.find((one) => one.name === $("engine").value) ?? engines[0];
  if (!shown || !visible) return;
  latest = shown;
  const history = histories.get(shown.model.name);
  drawTiles(shown, history);
  drawCharts(history);
  drawSteps(shown.engine.snapshot?.steps ?? []);
  drawBlocks(shown.engine.snapshot);
  drawSequences(shown.engine.snapshot);
}

/** Rates of a counter per second between consecutive entries of the history. */
const rates = (history, name) => history.slice(1).map((one, i) =>
  Math.max(0, (one.model.counters[name] - history[i].model.counters[name]) / Math.max(one.time - history[i].time, 1e-3)));

function drawTiles({ engine, model }, history) {
  const { stats } = engine, { counters } = model;
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)} %` : "–";
  const tiles = [
    ["running", count(stats.running)],
    ["waiting", count(stats.waiting)],
    ["tokens generated/s", count(rates(history, "generation_tokens").at(-1) ?? 0)],
    ["prompt tokens/s", count(rates(history, "prompt_tokens").at(-1) ?? 0)],
    [`of ${count(stats.blocks)} KV blocks in use`, share(stats.blocks_used, stats.blocks)],
    ["prefix cache hits", share(counters.prefix_cache_hits, counters.prefix_cache_queries)],
    ["preemptions", count(stats.preemptions)],
    ["drafts accepted", share(stats.accepted_tokens, stats.draft_tokens)],
    ["requests in total", count(counters.requests)],
    ["steps", count(stats.steps)],
    ["memory", `${(stats.cpu_memory / 2 ** 30).toFixed(2)} GiB`],
    ["heartbeat", seconds(stats.heartbeat_age)],
  ];
  if (counters.requests_resumed) tiles.push(["resumed requests", count(counters.requests_resumed)]);
  if (stats.gpu_memory) tiles.push(["GPU memory", `${(stats.gpu_memory / 2 ** 30).toFixed(2)} GiB`]);
  if (stats.kv_transfers) tiles.push(["KV transfers", `${count(stats.kv_completed)} of ${count(stats.kv_transfers)}`]);
  $("tiles").replaceChildren(...tiles.map(([name, value]) => make("div", { className: "tile" }, make("b", {}, value), make("span", { className: "quiet" }, name))));
}

function drawCharts(history) {
  const whole = (value) => value >= 10 || Number.isInteger(value) ? count(value) : value.toFixed(1);
  lines($("chart-tokens"), [
    { name: "generated", colour: "first", values: rates(history, "generation_tokens") },
    { name: "prompt", colour: "second", values: rates(history, "prompt_tokens") },
  ], SPAN, whole);
  lines($("chart-queue"), [
    { name: "running", colour: "first", values: history.map((one) => one.running) },
    { name: "waiting", colour: "second", values: history.map((one) => one.waiting) },
  ], SPAN, whole);
  for (const [id, name] of [["chart-ttft", "time_to_first_token_seconds"], ["chart-itl", "inter_token_latency_seconds"]]) {
    const now = history.at(-1).model.histograms[name], before = history[0].model.histograms[name];
    histogram($(id), now.buckets, now.counts.map((one, i) => one - (history.length > 1 ? before.counts[i] ?? 0 : 0)), seconds);
  }
}

function drawSteps(list) {
  const [context, width, height] = prepare($("chart-steps"));
  const last = list.slice(-80);
  steps = [];
  if (last.length) {
    const from = last[0].ago, to = last.at(-1).ago - last.at(-1).seconds;
    const scale = (width - 4) / Math.max(from - to, 1e-6);
    const most = Math.max(1, ...last.map((one) => one.parts.reduce((sum, part) => sum + part[1], 0)));
    steps = last.map((one) => {
      const prefill = one.parts.filter((part) => part[2]).reduce((sum, part) => sum + part[1], 0);
      const all = one.parts.reduce((sum, part) => sum + part[1], 0);
      return { ...one, prefill, decode: all - prefill, x: (from - one.ago) * scale, wide: one.seconds * scale };
    });
    const tall = (tokens) => tokens ? Math.max(2, Math.sqrt(tokens / most) * (height - 4)) : 0;
    steps.forEach((one, i) => {
      const wide = Math.max(1, one.wide - 1), decode = tall(one.decode), all = tall(one.decode + one.prefill);
      context.fillStyle = colour("second");
      context.fillRect(one.x, height - all, wide, all - decode);
      context.fillStyle = colour(i === stepAt ? "chosen" : "first");
      context.fillRect(one.x, height - decode, wide, decode);
    });
  }
  $("chart-steps").setAttribute("aria-label", last.length ? `the last ${last.length} steps, with different colours for prompt and generated tokens` : "no steps");
}

function showStep(i) {
  stepAt = i;
  drawSteps(latest?.engine.snapshot?.steps ?? []);
  describeStep();
}

function describeStep() {
  const step = steps[stepAt];
  if (!step) { $("step").textContent = "\u00a0"; return; }
  const parts = step.parts.slice(0, 12).map(([id, tokens, prefill]) => `${id} ${prefill ? "prompt" : "output"} ${tokens}`);
  const more = step.parts.length > 12 ? ` and ${step.parts.length - 12} more` : "";
  $("step").textContent = `${seconds(step.seconds)}, ${step.prefill} prompt and ${step.decode} output tokens: ${parts.join(", ")}${more}`;
}

function drawBlocks(snapshot) {
  const canvas = $("blocks"), states = snapshot?.cells ?? "", each = snapshot?.blocks_per_cell ?? 1;
  $("blocks-title").textContent = each === 1 ? "KV cache, one cell per block" : `KV cache, one cell per ${each} blocks, coloured by the most used block`;
  const columns = Math.max(1, Math.floor(canvas.clientWidth / CELL)), rows = Math.ceil(states.length / columns);
  canvas.style.height = `${Math.min(rows * CELL, 400)}px`;
  const size = rows * CELL > 400 ? CELL * Math.sqrt(400 / (rows * CELL)) : CELL;
  const [context, width] = prepare(canvas, Math.min(rows * CELL, 400));
  const across = Math.max(1, Math.floor(width / size));
  const shades = ["free", "cached", "used", "shared"].map(colour), mine = colour("chosen");
  const own = new Set(snapshot?.sequences.find((one) => one.id === chosen)?.blocks.map((block) => Math.floor(block / each)));
  for (let i = 0; i < states.length; i += 1) {
    context.fillStyle = own.has(i) ? mine : shades[states[i]];
    context.fillRect((i % across) * size, Math.floor(i / across) * size, size - 1, size - 1);
  }
  const tally = [0, 0, 0, 0];
  for (const one of states) tally[one] += 1;
  canvas.setAttribute("aria-label", `cells: ${tally[0]} free, ${tally[1]} free with a cached prefix, ${tally[2]} of one sequence, ${tally[3]} shared`);
}

function drawSequences(snapshot) {
  const list = snapshot?.sequences ?? [];
  const holders = new Map();
  for (const one of list) {
    for (const block of one.blocks) {
      if (!holders.has(block)) holders.set(block, []);
      if (holders.get(block).length < 8) holders.get(block).push(one.id);
    }
  }
  const focused = document.activeElement?.dataset?.sequence;
  $("sequences").tBodies[0].replaceChildren(...list.map((one) => {
    const button = make("button", { type: "button", "aria-pressed": String(one.id === chosen) }, one.id);
    button.dataset.sequence = one.id;
    button.addEventListener("click", () => { chosen = chosen === one.id ? "" : one.id; redraw(); });
    const others = [...new Set(one.blocks.flatMap((block) => holders.get(block)))].filter((id) => id !== one.id);
    const shown = others.slice(0, 6).join(", ") + (others.length > 6 ? ` and ${others.length - 6} more` : "");
    const cells = [one.state, count(one.prompt_tokens), count(one.cached_tokens), count(one.computed_tokens), count(one.output_tokens), one.seconds.toFixed(1), count(one.blocks.length), shown];
    return make("tr", { className: one.id === chosen ? "at" : "" }, make("td", {}, button), ...cells.map((text) => make("td", {}, text)));
  }));
  if (focused) $("sequences").querySelector(`[data-sequence="${CSS.escape(focused)}"]`)?.focus();
  $("live-state").textContent = snapshot?.hidden ? `${count(snapshot.hidden)} more sequences not shown` : "";
}
