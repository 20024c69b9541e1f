// Keyboard shortcuts, and the overlay that lists them.

import { $, make } from "./dom.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.userAgent);
const MODIFIER = MAC ? "⌘" : "Ctrl";

/** Shortcut of an event: "ctrl+k", "ctrl+shift+o", "/", "escape". */
function nameOf(event) {
  const parts = [event.ctrlKey || event.metaKey ? "ctrl" : "", event.altKey ? "alt" : ""];
  if (event.shiftKey && (parts[0] || event.key.length > 1)) parts.push("shift");
  return [...parts, event.key.toLowerCase()].filter(Boolean).join("+");
}

const SHOWN = { ctrl: MODIFIER, arrowup: "↑", enter: "Enter", shift: "Shift", escape: "Esc" };
const shown = (name) => name.split("+").map((part) => make("kbd", {}, SHOWN[part] ?? part.toUpperCase()));

/** Start shortcuts: [{keys, about, run, typing}]; `typing`: also in text fields. `run` returns false to leave the key alone. */
export function startShortcuts(shortcuts) {
  const byName = new Map(shortcuts.filter((one) => one.run).map((one) => [one.keys, one]));
  document.addEventListener("keydown", (event) => {
    const shortcut = byName.get(nameOf(event));
    if (!shortcut || event.isComposing || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (typing && !shortcut.typing) return;
    if (shortcut.run(event) !== false) event.preventDefault();
  });
  $("keys").replaceChildren(...shortcuts.flatMap((one) => [make("dt", {}, ...shown(one.keys)), make("dd", {}, one.about)]));
}
