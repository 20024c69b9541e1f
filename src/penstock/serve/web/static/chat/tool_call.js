// A tool call, with a field for its result.

import { icon } from "../ui/icons.js";
import { make } from "../ui/dom.js";

/** The call's arguments, indented if they are valid JSON. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function toolCallView(call, onResult) {
  const { name } = call.function;
  const field = make("textarea", { rows: 2, spellcheck: false, placeholder: "Result", "aria-label": `Result of ${name}` });
  const form = make("form", {}, field, make("div", { className: "row end" }, make("button", { type: "submit", className: "primary" }, "Send result")));
  form.addEventListener("submit", (event) => { event.preventDefault(); onResult(field.value); });
  return make("div", { className: "tool" }, make("p", { className: "tool-name" }, icon("tool"), make("b", {}, name)),
    make("pre", { tabIndex: 0 }, pretty(call.function.arguments)), form);
}
