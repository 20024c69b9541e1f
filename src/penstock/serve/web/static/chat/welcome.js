// The empty thread: model, context length, examples, and the address for API clients.

import { currentModel, currentName } from "../api/models.js";
import { hasLibraries } from "../render/libraries.js";
import { copyFrom } from "../ui/clipboard.js";
import { iconButton, make } from "../ui/dom.js";
import { count } from "../ui/format.js";
import { examplesFor } from "./examples.js";
import { mode } from "./settings.js";

const NO_LIBRARIES = "This build has no Markdown, math and charts: it was made without npm. Answers are shown as plain text.";

export function welcome(onExample) {
  const model = currentModel();
  if (!model) return make("div", { className: "welcome" }, make("p", { className: "quiet" }, "Waiting for a model…"));
  const abilities = [model.images && "images", model.tools && "tools", model.reasoning && "reasoning", !model.chat && "completions only"];
  const context = model.context ? `${count(model.context)} tokens of context` : "";
  const address = new URL("v1", document.baseURI).href;
  const copy = iconButton("copy", "Copy the address", () => copyFrom(copy, address));
  return make("div", { className: "welcome" },
    make("p", { className: "welcome-model" }, currentName().split("/").at(-1)),
    make("p", { className: "quiet" }, [context, ...abilities].filter(Boolean).join(" · ")),
    make("div", { className: "examples" }, ...examplesFor(model, mode() === "chat").map(([label, prompt]) =>
      make("button", { type: "button", className: "example", onclick: () => onExample(prompt) }, make("b", {}, label), make("span", {}, prompt)))),
    make("p", { className: "address" }, make("span", { className: "quiet" }, "API clients: "), make("code", {}, address), copy),
    hasLibraries ? null : make("p", { className: "quiet plain-note" }, NO_LIBRARIES));
}
