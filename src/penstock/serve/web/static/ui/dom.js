// Helpers for DOM elements. Text is always inserted as text, never as HTML.

import { icon } from "./icons.js";

export const $ = (id) => document.getElementById(id);

/** Create an element with properties (attributes if the name has a dash or is "role") and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A button with an icon and a label; `compact`: the label is only read aloud and shown as tooltip. */
export function iconButton(name, label, onclick, { compact = true, className = "" } = {}) {
  const button = make("button", { type: "button", className: `${compact ? "icon" : ""} ${className}`.trim(), onclick }, icon(name));
  if (compact) {
    button.setAttribute("aria-label", label);
    button.title = label;
  } else {
    button.append(` ${label}`);
  }
  return button;
}

/** Put the icons into the elements of the document that name one. */
export function drawIcons() {
  for (const element of document.querySelectorAll("[data-icon]")) {
    element.prepend(icon(element.dataset.icon));
    if (element.matches("button.icon") && !element.title) element.title = element.getAttribute("aria-label");
  }
}
