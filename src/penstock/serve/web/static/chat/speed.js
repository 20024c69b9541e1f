// Speed of an answer. src/penstock/cli/chat/speed.py is the same function for the terminal.

/** Shortest time in seconds over which the rate between tokens is measured: tokens arrive in groups. */
export const MIN_SPAN = 1;

/**
 * Tokens per second; null if there is nothing to measure. Times are in seconds.
 *
 * Long answers: rate from the first token to the last one. Short answers, whose tokens arrive in a few groups: tokens by the
 * time since the request, which includes the prompt.
 */
export function tokensPerSecond({ tokens, started, first, last }) {
  if (!tokens || first === null || last === null) return null;
  if (tokens > 1 && last - first >= MIN_SPAN) return (tokens - 1) / (last - first);
  return last > started ? tokens / (last - started) : null;
}
