// The last steps of an engine: height is the number of tokens, width the duration.

import { $ } from "../ui/dom.js";
import { seconds } from "../ui/format.js";
import { colour } from "../ui/theme.js";
import { prepare } from "./canvas.js";

const SHOWN = 80, NAMED = 12;
let steps = [], at = -1, given = [];

const tokensOf = (parts) => parts.reduce((sum, part) => sum + part[1], 0);

export function startSteps() {
  const canvas = $("chart-steps");
  canvas.addEventListener("pointermove", ({ offsetX }) => select(steps.findIndex((one) => one.x <= offsetX && offsetX <= one.x + Math.max(one.wide, 2))));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    select(at < 0 ? steps.length - 1 : Math.max(0, Math.min(steps.length - 1, at + move)));
  });
}

function select(i) {
  at = i;
  drawSteps(given);
  const step = steps[at];
  if (!step) return void ($("step").textContent = "\u00a0");
  const parts = step.parts.slice(0, NAMED).map(([id, tokens, prefill]) => `${id} ${prefill ? "prompt" : "output"} ${tokens}`);
  const more = step.parts.length > NAMED ? ` and ${step.parts.length - NAMED} more` : "";
  $("step").textContent = `${seconds(step.seconds)}, ${step.prefill} prompt and ${step.decode} output tokens: ${parts.join(", ")}${more}`;
}

export function drawSteps(list) {
  given = list;
  const [context, width, height] = prepare($("chart-steps"));
  const last = list.slice(-SHOWN);
  steps = last.length ? placed(last, width) : [];
  const most = Math.max(1, ...steps.map((one) => one.prefill + one.decode));
  const tall = (tokens) => tokens ? Math.max(2, Math.sqrt(tokens / most) * (height - 4)) : 0;
  steps.forEach((one, i) => {
    const wide = Math.max(1, one.wide - 1), decode = tall(one.decode), all = tall(one.decode + one.prefill);
    context.fillStyle = colour("second");
    context.fillRect(one.x, height - all, wide, all - decode);
    context.fillStyle = colour(i === at ? "chosen" : "first");
    context.fillRect(one.x, height - decode, wide, decode);
  });
  const label = last.length ? `the last ${last.length} steps, with different colours for prompt and generated tokens` : "no steps";
  $("chart-steps").setAttribute("aria-label", label);
}

/** Steps with their place on the canvas. */
function placed(list, width) {
  const from = list[0].ago, to = list.at(-1).ago - list.at(-1).seconds;
  const scale = (width - 4) / Math.max(from - to, 1e-6);
  return list.map((one) => {
    const prefill = tokensOf(one.parts.filter((part) => part[2]));
    return { ...one, prefill, decode: tokensOf(one.parts) - prefill, x: (from - one.ago) * scale, wide: one.seconds * scale };
  });
}
