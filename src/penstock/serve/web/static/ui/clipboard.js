// Copying text, with a confirmation on the button.

import { icon } from "./icons.js";

const CONFIRMED = 1500;

/** Copy a text. Without the clipboard API (plain HTTP), select and copy it. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "hidden";
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Copy, and show a check mark on the button for a moment. */
export async function copyFrom(button, text) {
  await copyText(text);
  const before = button.querySelector(".glyph");
  const done = icon("check");
  before?.replaceWith(done);
  button.classList.add("done");
  setTimeout(() => { done.replaceWith(before); button.classList.remove("done"); }, CONFIRMED);
}
