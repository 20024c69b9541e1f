// Charts with uPlot: lines over time, and histograms.

import { hasLibraries, loadPlot } from "../render/libraries.js";
import { $, make } from "../ui/dom.js";
import { count } from "../ui/format.js";
import { colour } from "../ui/theme.js";
import { quantile, visible } from "./histogram.js";
import { SPAN } from "./state.js";

const HEIGHT = 170;
const FONT = "12px system-ui, sans-serif";
const charts = new Map();

const axis = () => ({ stroke: colour("quiet"), font: FONT, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } });
const clock = (times) => times.map((time) => new Date(1000 * time).toLocaleTimeString("en", { hour12: false }));

/** Discard the charts, so that they are drawn with the colours of the theme. */
export function resetCharts() {
  for (const plot of charts.values()) plot.destroy();
  charts.clear();
}

/** Draw into an element: creates the chart at first, then sets its data. */
async function draw(element, optionsOf, data, range = null) {
  if (!hasLibraries) return;
  const uPlot = await loadPlot(), width = element.clientWidth;
  if (!width) return;
  if (!charts.has(element.id)) {
    const fixed = { width, height: HEIGHT, padding: [10, 12, 0, 0], legend: { show: false } };
    charts.set(element.id, new uPlot({ ...fixed, ...optionsOf(uPlot) }, data, element));
  }
  const plot = charts.get(element.id);
  if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
  plot.setData(data, !range);
  if (range) plot.setScale("x", range);
  else plot.redraw(false, true);  // names of the buckets
}

/** Lines over the last two minutes. series: [{name, shade}]; `data`: times and a row for each series. */
export function lines(element, series, data, format) {
  const now = data[0].at(-1) ?? Date.now() / 1000;
  const last = (row) => row.findLast((value) => value !== null) ?? 0;
  const largest = (row) => row.reduce((most, value) => Math.max(most, value ?? 0), 0);
  element.setAttribute("aria-label", series.map(({ name }, i) => `${name}: now ${format(last(data[i + 1]))}, maximum ${format(largest(data[i + 1]))}`).join("; "));
  const describe = (rows, at = null) => drawLegend($(`${element.id}-summary`), series, rows.slice(1).map((row) => format(at === null ? last(row) : row[at] ?? 0)), at === null ? "" : clock([rows[0][at]])[0]);
  describe(data);
  return draw(element, () => ({
    axes: [{ ...axis(), values: (_, times) => clock(times), space: 90, size: 28 }, { ...axis(), values: (_, values) => values.map(format), size: 56, space: 28 }],
    scales: { x: { time: true, auto: false }, y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1)] } },
    series: [{}, ...series.map(({ shade }) => ({ stroke: colour(shade), width: 2, points: { show: false } }))],
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    hooks: { setCursor: [(plot) => describe(plot.data, plot.cursor.idx ?? null)] },
  }), data, { min: now - SPAN, max: now });
}

/** Names and values of the series: the last ones, or those at the pointer. */
function drawLegend(element, series, values, time) {
  element.replaceChildren(time, ...series.map(({ name, shade }, i) => make("span", { className: `key ${shade}` }, `${name} ${values[i]}`)));
}

/** Bars of a histogram, of which each is a bucket. Returns the summary. */
export function histogram(element, given, format) {
  const { bounds, counts } = visible(given);
  const total = counts.reduce((sum, one) => sum + one, 0);
  const summary = total ? `p50 ≤ ${format(quantile(given, 0.5))} · p95 ≤ ${format(quantile(given, 0.95))} · n = ${total}` : "no data";
  element.setAttribute("aria-label", summary);
  const labels = bounds.map((bound) => bound === null ? "more" : format(bound));
  element.labels = labels;
  draw(element, (uPlot) => ({
    axes: [{ ...axis(), grid: { show: false }, splits: () => element.labels.map((_, i) => i), values: (_, splits) => every(splits, element), space: 1, size: 28 }, { ...axis(), size: 56, space: 28, values: (_, values) => values.map((value) => Number.isInteger(value) ? count(value) : "") }],
    scales: { x: { time: false, range: () => [-0.6, Math.max(element.labels.length, 6) - 0.4] }, y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1)] } },
    series: [{}, { label: "count", fill: colour("first"), stroke: colour("first"), width: 0, paths: uPlot.paths.bars({ size: [0.86, 80] }), points: { show: false } }],
    cursor: { show: false },
  }), [labels.map((_, i) => i), counts]);
  return summary;
}

/** Labels of the buckets, fewer if they would overlap. */
function every(splits, element) {
  const step = Math.ceil(splits.length * 62 / Math.max(element.clientWidth - 56, 62));
  return splits.map((i) => i % step ? "" : element.labels[i]);
}
