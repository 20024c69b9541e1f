// The API key, which is kept only in this tab.

import { make } from "../ui/dom.js";

const STORED = "penstock-api-key";
let asking = null;

/** The key, if the browser refuses storage. */
let kept = null;

export function storedKey() {
  try {
    return sessionStorage.getItem(STORED);
  } catch {
    return kept;
  }
}

function keep(key) {
  kept = key;
  try {
    sessionStorage.setItem(STORED, key);
  } catch {
    // kept until the page is closed
  }
}

/** The dialog, with its field and the message for a refused key. */
function createDialog() {
  const field = make("input", { type: "password", id: "key", autocomplete: "off", spellcheck: false });
  const refused = make("p", { id: "key-refused", className: "problem", role: "alert", hidden: true });
  const dialog = make("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, make("form", { method: "dialog" },
    make("h2", { id: "key-title" }, "This server requires an API key"), refused,
    make("label", { className: "field" }, "API key ", field),
    make("p", { className: "quiet" }, "The key is kept until this tab is closed, and sent only to this server."),
    make("p", { className: "row end" }, make("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
      make("button", { value: "ok", className: "primary" }, "OK"))));
  document.body.append(dialog);
  return { dialog, field, refused };
}

let created = null;

/** Ask for an API key; resolves to true if a key was entered. Concurrent callers share one dialog. */
export function askForKey({ refused = false } = {}) {
  asking ??= new Promise((resolve) => {
    created ??= createDialog();
    const { dialog, field } = created;
    created.refused.hidden = !refused;
    created.refused.textContent = refused ? "The server refused this key. Enter another one." : "";
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "ok" ? field.value.trim() : "";
      if (given) keep(given);
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
