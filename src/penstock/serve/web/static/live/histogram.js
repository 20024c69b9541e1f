// Quantiles and visible buckets of a histogram.

/** Upper bound of the bucket that contains a quantile; null without data. */
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    seen += counts[i];
    if (total && seen >= share * total) return bounds[i] ?? bounds[i - 1];
  }
  return null;
}

/** The buckets with data, and one on each side. */
export function visible({ bounds, counts }) {
  const first = counts.findIndex((one) => one > 0);
  if (first < 0) return { bounds: [], counts: [] };
  const from = Math.max(0, first - 1), to = Math.min(counts.length, counts.findLastIndex((one) => one > 0) + 2);
  return { bounds: bounds.slice(from, to), counts: counts.slice(from, to) };
}
