// The KV cache: a cell for each block, or for several.

import { $ } from "../ui/dom.js";
import { colour } from "../ui/theme.js";
import { prepare } from "./canvas.js";

const CELL = 10, MAX_HEIGHT = 400;

/** Draw the blocks of a snapshot; those of the sequence `chosen` have another colour. */
export function drawBlocks(snapshot, chosen) {
  const canvas = $("blocks"), states = snapshot?.cells ?? "", each = snapshot?.blocks_per_cell ?? 1;
  $("blocks-title").textContent = each === 1 ? "KV cache, one cell per block" : `KV cache, one cell per ${each} blocks, coloured by the most used block`;
  const rows = Math.ceil(states.length / Math.max(1, Math.floor(canvas.clientWidth / CELL)));
  const height = Math.min(rows * CELL, MAX_HEIGHT);
  canvas.style.height = `${height}px`;
  const size = rows * CELL > MAX_HEIGHT ? CELL * Math.sqrt(MAX_HEIGHT / (rows * CELL)) : CELL;
  const [context, width] = prepare(canvas, height);
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
