// The API key, which is kept only in this tab.

import { $ } from "../ui/dom.js";

const STORED = "penstock-api-key";
let asking = null;

export const storedKey = () => sessionStorage.getItem(STORED);

/** Ask for an API key; resolves to true if a key was entered. Concurrent callers share one dialog. */
export function askForKey({ refused = false } = {}) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog"), field = $("key");
    $("key-refused").hidden = !refused;
    $("key-refused").textContent = refused ? "The server refused this key. Enter another one." : "";
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "ok" ? field.value.trim() : "";
      if (given) sessionStorage.setItem(STORED, given);
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
