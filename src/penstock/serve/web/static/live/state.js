// States of the engines, and their history.

/** Seconds that the charts show. */
export const SPAN = 120;
/** Longest time between two states that is drawn as a line. */
const MAX_GAP = 5;

let engines = [];
const histories = new Map();

/** Add a state of all models to the history of each. */
export function take(state) {
  engines = state.models.flatMap((model) => model.engines.map((engine, i) => {
    const where = engine.address || (model.engines.length > 1 ? `engine ${i}` : "");
    return { model, engine, name: [model.name, where, engine.role].filter(Boolean).join(" · ") };
  }));
  for (const model of state.models) {
    let history = histories.get(model.name) ?? [];
    if (history.length && history.at(-1).model.counters.requests > model.counters.requests) history = [];  // a restart
    const total = (name) => model.engines.reduce((sum, one) => sum + one.stats[name], 0);
    history.push({ time: state.time, model, running: total("running"), waiting: total("waiting") });
    while (history[0].time < state.time - SPAN - MAX_GAP) history.shift();
    histories.set(model.name, history);
  }
  return engines.map((one) => one.name);
}

/** The engine of a name, or the first one. */
export const engineOf = (name) => engines.find((one) => one.name === name) ?? engines[0];
export const historyOf = (model) => histories.get(model.name);

/** Points of a chart: times, and a row of values for each series. Gaps between states are empty. */
export function points(history, series) {
  const times = [], rows = series.map(() => []);
  history.forEach((one, i) => {
    const before = history[i - 1];
    if (!before) return;
    if (one.time - before.time > MAX_GAP) {
      times.push(before.time + 1e-3);
      for (const row of rows) row.push(null);
    }
    times.push(one.time);
    series.forEach((value, k) => rows[k].push(value(one, before)));
  });
  return [times, ...rows];
}

/** Rate of a counter per second between two states. */
export const rateOf = (name) => (one, before) =>
  Math.max(0, (one.model.counters[name] - before.model.counters[name]) / Math.max(one.time - before.time, 1e-3));

/** Increase of a histogram's buckets over the history: {bounds, counts}. */
export function increase(history, name) {
  const now = history.at(-1).model.histograms[name], before = history[0].model.histograms[name];
  return { bounds: now.buckets, counts: now.counts.map((one, i) => one - (history.length > 1 ? before.counts[i] ?? 0 : 0)) };
}
