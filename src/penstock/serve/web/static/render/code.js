// Code blocks: language, copy button and highlighting.

import { copyFrom } from "../ui/clipboard.js";
import { iconButton, make } from "../ui/dom.js";
import { loadHighlight } from "./libraries.js";

const MAX_HIGHLIGHTED = 50_000;

/** A code block with a head. */
export function codeBlock(text, language) {
  const code = make("code", {});
  const button = iconButton("copy", "Copy", () => copyFrom(button, code.textContent), { compact: false, className: "plain" });
  const block = make("div", { className: "code" },
    make("div", { className: "code-head" }, make("span", {}, language || "text"), button),
    make("pre", { tabIndex: 0 }, code));
  setCode(block, text, language);
  return block;
}

/** Change the text of a code block in place, so that scrolling and the button survive while it grows. */
export async function setCode(block, text, language) {
  const code = block.querySelector("code");
  const version = block.version = (block.version ?? 0) + 1;
  if (!language || text.length > MAX_HIGHLIGHTED) return void (code.textContent = text);
  if (!block.highlighted) code.textContent = text;
  const highlighter = await loadHighlight();
  if (version !== block.version) return;
  block.highlighted = Boolean(highlighter.getLanguage(language));
  if (!block.highlighted) return void (code.textContent = text);
  code.innerHTML = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
}
