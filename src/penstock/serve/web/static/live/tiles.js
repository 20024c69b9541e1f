// Figures of an engine and its model.

import { $, make } from "../ui/dom.js";
import { count, seconds } from "../ui/format.js";

const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)} %` : "–";
const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

/** Draw the figures. `generated`, `prompts`: current rates in tokens per second. */
export function drawTiles({ stats }, { counters }, generated, prompts) {
  const tiles = [
    ["tokens generated/s", count(generated)],
    ["prompt tokens/s", count(prompts)],
    ["running", count(stats.running)],
    ["waiting", count(stats.waiting)],
    [`of ${count(stats.blocks)} KV blocks`, share(stats.blocks_used, stats.blocks)],
    ["prefix cache hits", share(counters.prefix_cache_hits, counters.prefix_cache_queries)],
    ["drafts accepted", share(stats.accepted_tokens, stats.draft_tokens)],
    ["preemptions", count(stats.preemptions)],
    ["requests in total", count(counters.requests)],
    ["steps", count(stats.steps)],
    ["memory", gib(stats.cpu_memory)],
    ["heartbeat", seconds(stats.heartbeat_age)],
  ];
  if (stats.accepted_tokens) {
    tiles.push(["tokens per sequence and step", (1 + stats.accepted_tokens / stats.decoded_rows).toFixed(2)]);
    if (stats.decode_seconds) tiles.push(["× speed without drafts", (stats.seconds_without_drafts / stats.decode_seconds).toFixed(2)]);
  }
  if (counters.requests_resumed) tiles.push(["resumed requests", count(counters.requests_resumed)]);
  if (stats.gpu_memory) tiles.push(["GPU memory", gib(stats.gpu_memory)]);
  if (stats.kv_transfers) tiles.push(["KV transfers", `${count(stats.kv_completed)} of ${count(stats.kv_transfers)}`]);
  $("tiles").replaceChildren(...tiles.map(([name, value]) => make("div", { className: "tile" }, make("b", {}, value), make("span", { className: "quiet" }, name))));
}
