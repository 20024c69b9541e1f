// Numbers and times as text.

/** Format a duration in seconds. */
export const seconds = (value) => value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
export const count = (value) => Math.round(value).toLocaleString("en");
/** Format a rate: one decimal below 100. */
export const rate = (value) => value < 100 ? value.toFixed(1) : count(value);

const DAY = 86_400_000;

/** Group of a conversation in the list. */
export function age(time, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last seven days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
