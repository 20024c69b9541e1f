// The table of sequences.

import { $, make } from "../ui/dom.js";
import { count } from "../ui/format.js";

const MAX_HOLDERS = 8, MAX_NAMED = 6;

/** Draw the sequences of a snapshot; `onChoose(id)` is called with the id of a selected sequence. */
export function drawSequences(snapshot, chosen, onChoose) {
  const list = snapshot?.sequences ?? [], holders = holdersOf(list);
  const focused = document.activeElement?.dataset?.sequence;
  const row = (one) => {
    const button = make("button", { type: "button", className: "link", "aria-pressed": String(one.id === chosen), onclick: () => onChoose(one.id) }, one.id);
    button.dataset.sequence = one.id;
    const cells = [one.state, count(one.prompt_tokens), count(one.cached_tokens), count(one.computed_tokens), count(one.output_tokens), one.seconds.toFixed(1), count(one.blocks.length), sharers(one, holders)];
    return make("tr", { className: one.id === chosen ? "at" : "" }, make("td", {}, button), ...cells.map((text) => make("td", {}, text)));
  };
  $("sequences").tBodies[0].replaceChildren(...list.map(row));
  if (focused) $("sequences").querySelector(`[data-sequence="${CSS.escape(focused)}"]`)?.focus();
  $("live-hidden").textContent = snapshot?.hidden ? `${count(snapshot.hidden)} more sequences are not shown.` : "";
}

/** Sequences that hold each block. */
function holdersOf(list) {
  const holders = new Map();
  for (const one of list) {
    for (const block of one.blocks) {
      if (!holders.has(block)) holders.set(block, []);
      if (holders.get(block).length < MAX_HOLDERS) holders.get(block).push(one.id);
    }
  }
  return holders;
}

function sharers(one, holders) {
  const others = [...new Set(one.blocks.flatMap((block) => holders.get(block)))].filter((id) => id !== one.id);
  return others.slice(0, MAX_NAMED).join(", ") + (others.length > MAX_NAMED ? ` and ${others.length - MAX_NAMED} more` : "");
}
