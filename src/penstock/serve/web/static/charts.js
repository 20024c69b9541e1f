// Charts on canvases.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Prepare a canvas for drawing in CSS pixels; returns [context, width, height]. */
export function prepare(canvas, height = canvas.clientHeight) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

/** Round up to 1, 2, 5 or 10 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}

/** Draw a line chart over time. series: [{name, colour, values}] of equal length; `span`: width in seconds. */
export function lines(canvas, series, span, format) {
  const [context, width, height] = prepare(canvas);
  const top = roundUp(Math.max(1, ...series.flatMap((one) => one.values)));
  const left = 48, bottom = height - 16, points = Math.max(2, ...series.map((one) => one.values.length));
  context.strokeStyle = colour("line");
  context.fillStyle = colour("quiet");
  for (const share of [0, 0.5, 1]) {
    const y = bottom - share * (bottom - 8);
    context.beginPath(); context.moveTo(left, y); context.lineTo(width, y); context.stroke();
    context.textAlign = "right";
    context.fillText(format(share * top), left - 6, y + 4);
  }
  context.textAlign = "left";
  context.fillText(`−${span} s`, left, height - 3);
  let x = left + 60;
  for (const { name, colour: shade, values } of series) {
    context.strokeStyle = context.fillStyle = colour(shade);
    context.fillText(`${name} ${format(values.at(-1) ?? 0)}`, x, height - 3);
    x += context.measureText(`${name} ${format(values.at(-1) ?? 0)}`).width + 16;
    context.lineWidth = 1.5;
    context.beginPath();
    values.forEach((value, i) => context.lineTo(left + (i + points - values.length) * (width - left) / (points - 1), bottom - value / top * (bottom - 8)));
    context.stroke();
  }
  context.lineWidth = 1;
  canvas.setAttribute("aria-label", series.map(({ name, values }) => `${name}: now ${format(values.at(-1) ?? 0)}, maximum ${format(Math.max(0, ...values))}`).join("; "));
}

/** Draw a histogram. `bounds`: upper bounds of the buckets, null for the last. */
export function histogram(canvas, bounds, counts, format) {
  const [context, width, height] = prepare(canvas);
  const total = counts.reduce((sum, one) => sum + one, 0), most = Math.max(1, ...counts);
  const from = Math.max(0, counts.findIndex((one) => one > 0) - 1);
  const to = Math.min(counts.length, counts.findLastIndex((one) => one > 0) + 2);
  const shown = total ? counts.slice(from, to) : [];
  const wide = width / Math.max(shown.length, 6), bottom = height - 16;
  shown.forEach((value, i) => {
    const tall = value / most * (bottom - 14);
    context.fillStyle = colour("first");
    context.fillRect(i * wide + 1, bottom - tall, wide - 2, tall);
    context.fillStyle = colour("quiet");
    context.textAlign = "center";
    const bound = bounds[from + i];
    context.fillText(bound === null ? "more" : format(bound), (i + 0.5) * wide, height - 3);
  });
  const p50 = quantile(bounds, counts, 0.5), p95 = quantile(bounds, counts, 0.95);
  const summary = total ? `p50 ${format(p50)}, p95 ${format(p95)}, n = ${total}` : "no data";
  context.fillStyle = colour("quiet");
  context.textAlign = "right";
  context.fillText(summary, width - 4, 10);
  canvas.setAttribute("aria-label", summary);
}

function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    seen += counts[i];
    if (seen >= share * total) return bounds[i] ?? bounds[i - 1];
  }
  return 0;
}
