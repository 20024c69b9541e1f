// The live view: the state of the engines, updated once a second while visible.

import { call } from "../api/client.js";
import { $, make } from "../ui/dom.js";
import { count, rate, seconds } from "../ui/format.js";
import { drawBlocks } from "./blocks.js";
import { histogram, lines, resetCharts } from "./charts.js";
import { layOut } from "./layout.js";
import { drawSequences } from "./sequences.js";
import { engineOf, historyOf, increase, points, rateOf, take } from "./state.js";
import { drawSteps, startSteps } from "./steps.js";
import { drawTiles } from "./tiles.js";

const INTERVAL = 1000;
const LATENCIES = { "chart-ttft": "time_to_first_token_seconds", "chart-itl": "inter_token_latency_seconds" };
let visible = false, timer = null, chosen = "";

layOut($("live"));
startSteps();
$("engine").addEventListener("change", draw);
$("hold").addEventListener("change", tick);
new ResizeObserver(draw).observe($("live"));

export function setVisible(value) {
  visible = value;
  tick();
}

/** Draw again, after a change of the theme. */
export function redraw() {
  resetCharts();
  draw();
}

async function tick() {
  clearTimeout(timer);
  if (!visible || $("hold").checked) return;
  try {
    if (!document.hidden) {
      showEngines(take(await (await call("web/live", { silent: true })).json()));
      $("live-state").textContent = "";
      draw();
    }
  } catch (error) {
    $("live-state").textContent = error.hint ? `${error.message} ${error.hint}` : error.message;
  }
  timer = setTimeout(tick, INTERVAL);
}

function showEngines(names) {
  if (names.join() === [...$("engine").options].map((one) => one.value).join()) return;
  const before = $("engine").value;
  $("engine").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(before)) $("engine").value = before;
}

function draw() {
  const shown = engineOf($("engine").value);
  if (!shown || !visible) return;
  const history = historyOf(shown.model), { snapshot } = shown.engine;
  drawCharts(history, shown);
  drawSteps(snapshot?.steps ?? []);
  drawBlocks(snapshot, chosen);
  drawSequences(snapshot, chosen, (id) => { chosen = chosen === id ? "" : id; draw(); });
}

function drawCharts(history, { engine, model }) {
  const tokens = points(history, [rateOf("generation_tokens"), rateOf("prompt_tokens")]);
  drawTiles(engine, model, tokens[1].at(-1) ?? 0, tokens[2].at(-1) ?? 0);
  lines($("chart-tokens"), [{ name: "generated", shade: "first" }, { name: "prompt", shade: "second" }], tokens, (value) => value < 10 ? rate(value).replace(/\.0$/, "") : count(value));
  const sequences = points(history, [(one) => one.running, (one) => one.waiting]);
  lines($("chart-queue"), [{ name: "running", shade: "first" }, { name: "waiting", shade: "second" }], sequences, (value) => rate(value).replace(/\.0$/, ""));
  for (const [id, name] of Object.entries(LATENCIES)) $(`${id}-summary`).textContent = histogram($(id), increase(history, name), seconds);
}
