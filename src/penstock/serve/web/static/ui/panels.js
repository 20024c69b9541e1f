// The list of conversations and the settings: beside the thread on wide windows, above it on narrow ones.

import { $ } from "./dom.js";
import { store, stored } from "./storage.js";

const NARROW = matchMedia("(max-width: 60rem)");
const PANELS = { sidebar: "toggle-sidebar", settings: "toggle-settings" };
const wanted = stored("panels", {});

export const isOpen = (name) => !$(name).hidden;
export const isNarrow = () => NARROW.matches;

/** Open or close a panel. Focus moves into an overlay, and back to the button. */
export function setPanel(name, open, { focus = true } = {}) {
  if (open === isOpen(name)) return;
  if (open && isNarrow()) {
    for (const other of Object.keys(PANELS)) if (other !== name) setPanel(other, false, { focus: false });
  }
  const hadFocus = $(name).contains(document.activeElement);
  $(name).hidden = !open;
  $(PANELS[name]).setAttribute("aria-expanded", String(open));
  $("backdrop").hidden = !(isNarrow() && Object.keys(PANELS).some(isOpen));
  for (const part of [document.querySelector(".top"), $("main")]) part.inert = !$("backdrop").hidden;
  if (focus && open && (isNarrow() || name === "settings")) $(name).querySelector("button:not([hidden]), input")?.focus();
  if (focus && !open && hadFocus) $(PANELS[name]).focus();
  if (!isNarrow()) {
    wanted[name] = open;
    store("panels", wanted);
  }
}

export const togglePanel = (name) => setPanel(name, !isOpen(name));

/** Close the overlay, if there is one. Returns whether one was closed. */
export function closeOverlay() {
  const open = Object.keys(PANELS).filter(isOpen);
  const closed = isNarrow() ? open : open.filter((name) => name === "settings" && $(name).contains(document.activeElement));
  for (const name of closed) setPanel(name, false);
  return closed.length > 0;
}

export function startPanels() {
  for (const [name, button] of Object.entries(PANELS)) {
    $(button).addEventListener("click", () => togglePanel(name));
    $(`close-${name}`).addEventListener("click", () => setPanel(name, false));
  }
  $("backdrop").addEventListener("click", closeOverlay);
  const arrange = () => {
    $("backdrop").hidden = true;
    setPanel("sidebar", !isNarrow() && (wanted.sidebar ?? true), { focus: false });
    setPanel("settings", !isNarrow() && (wanted.settings ?? false), { focus: false });
  };
  NARROW.addEventListener("change", arrange);
  arrange();
}
