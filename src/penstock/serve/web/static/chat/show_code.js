// The dialog that shows the current request as code.

import { $ } from "../ui/dom.js";
import { copyFrom } from "../ui/clipboard.js";
import { toastError } from "../ui/toast.js";
import { asCurl, asPython } from "./snippets.js";
import { requestFor } from "./settings.js";

export function startShowCode(shown) {
  $("show-code").addEventListener("click", () => {
    const conversation = shown(), text = $("prompt").value;
    const path = conversation.path();
    if (text.trim()) path.push({ role: "user", content: text, images: [] });
    try {
      const [address, body] = requestFor(conversation, path);
      $("curl").textContent = asCurl(address, body);
      $("python").textContent = asPython(address, body);
      $("code-dialog").showModal();
    } catch (error) {
      toastError(error, { hint: "Correct the value in the settings." });
    }
  });
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copyFrom(button, $(button.dataset.copy).textContent));
  }
}
