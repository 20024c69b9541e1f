// Notifications: what happened, and what to do.

import { $, iconButton, make } from "./dom.js";

const SHOWN = 8000;

/** Show a notification. `action`: {label, run}; `kind`: "error" stays until it is closed. */
export function toast(message, { hint = "", action = null, kind = "note" } = {}) {
  const close = () => element.remove();
  const text = make("div", {}, make("p", {}, message), hint ? make("p", { className: "quiet" }, hint) : null);
  const element = make("div", { className: `toast ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
  if (action) element.append(make("button", { type: "button", onclick: () => { close(); action.run(); } }, action.label));
  element.append(iconButton("close", "Close", close));
  for (const other of $("toasts").children) {
    if (other.dataset.message === message) other.remove();
  }
  element.dataset.message = message;
  $("toasts").append(element);
  if (kind !== "error") setTimeout(close, SHOWN);
  return close;
}

/** Show an error (an Error, or a text). */
export const toastError = (error, options = {}) =>
  toast(error.message ?? error, { hint: error.hint ?? "", kind: "error", ...options });
