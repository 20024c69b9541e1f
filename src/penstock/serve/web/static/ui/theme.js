// Theme: as the system has it, light or dark.

import { $ } from "./dom.js";
import { store, stored } from "./storage.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Colours of the style sheet as the browser resolves them, for canvases. */
export function colour(name) {
  const probe = $("theme");
  const before = probe.style.color;
  probe.style.color = `var(--${name})`;
  const value = getComputedStyle(probe).color;
  probe.style.color = before;
  return value;
}

export const theme = () => stored("theme") ?? (dark.matches ? "dark" : "light");

/** Apply the theme; `onChange` runs after each change. */
export function startTheme(onChange) {
  const apply = () => {
    if (stored("theme")) document.documentElement.dataset.theme = stored("theme");
    $("theme").title = `Theme: ${theme()}`;
    onChange();
  };
  $("theme").addEventListener("click", () => {
    store("theme", theme() === "dark" ? "light" : "dark");
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}
