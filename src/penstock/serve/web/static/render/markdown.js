// Markdown: parsed by marked, cleaned by DOMPurify, drawn block by block so that finished blocks stay untouched.

import { make } from "../ui/dom.js";
import { codeBlock, setCode } from "./code.js";
import { hasLibraries, loadMarked, loadPurify } from "./libraries.js";
import { mathExtensions, renderMath } from "./math.js";
import { closeOpenMarks } from "./open_marks.js";

const TAGS = ["a", "b", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "i", "img", "li", "ol", "p", "pre",
  "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["align", "alt", "class", "href", "src", "start", "title"];
const FIRST_LEVEL = 3;

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

/** HTML in an answer is shown as text; images of other hosts are shown as links, since the page contacts no other host. */
const renderer = {
  html: ({ text }) => escaped(text),
  image: ({ href, text }) => /^data:image\/(png|jpeg|gif|webp);/.test(href)
    ? `<img src="${escaped(href)}" alt="${escaped(text)}">` : `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
};

let parsing = null;

/** Load the parser; resolves to {lex, draw}. */
export function markdownReady() {
  parsing ??= Promise.all([loadMarked(), loadPurify()]).then(([{ Marked }, purify]) => {
    const marked = new Marked({ gfm: true, renderer, extensions: mathExtensions });
    purify.addHook("afterSanitizeAttributes", (node) => {
      if (node.tagName !== "A") return;
      node.target = "_blank";
      node.rel = "noopener noreferrer nofollow";
    });
    const fragment = (html) => purify.sanitize(html, { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, RETURN_DOM_FRAGMENT: true });
    return {
      lex(text) {
        const tokens = marked.lexer(text);
        let level = FIRST_LEVEL - 1;
        marked.walkTokens(tokens, (token) => {
          if (token.type === "heading") level = token.depth = Math.min(6, level + 1, token.depth + FIRST_LEVEL - 1);
        });
        return tokens.filter((token) => token.type !== "space");
      },
      draw: (token) => fragment(marked.parser([token])),
    };
  });
  return parsing;
}

/** An element that shows a growing Markdown text. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.blocks = [];
    this.text = "";
    this.ready = null;
    element.classList.add("prose", "plain");
    if (hasLibraries) markdownReady().then((ready) => { this.ready = ready; this.draw(); }, () => {});
  }

  /** Show a text; `growing`: more of it follows. */
  show(text, growing = false) {
    this.text = text;
    this.growing = growing;
    this.draw();
  }

  draw() {
    if (!this.ready) return void (this.element.textContent = this.text);
    if (!this.blocks.length) this.element.replaceChildren();
    this.element.classList.remove("plain");
    const tokens = this.ready.lex(this.growing ? closeOpenMarks(this.text) : this.text);
    tokens.forEach((token, i) => this.drawBlock(token, i));
    for (const block of this.blocks.splice(tokens.length)) block.element.remove();
  }

  drawBlock(token, i) {
    const before = this.blocks[i];
    if (before?.raw === token.raw) return;
    const language = token.type === "code" ? (token.lang ?? "").split(/\s/)[0] : null;
    if (before && language !== null && before.language === language) {
      before.raw = token.raw;
      return void setCode(before.element, token.text, language);
    }
    const element = language === null ? drawn(this.ready.draw(token)) : codeBlock(token.text, language);
    if (before) before.element.replaceWith(element);
    else this.element.append(element);
    this.blocks[i] = { raw: token.raw, language, element };
  }
}

/** Decorate the parts of a block that need more than HTML. */
function drawn(fragment) {
  const block = make("div", { className: "block" }, fragment);
  for (const pre of block.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
    pre.replaceWith(codeBlock(pre.textContent, language));
  }
  for (const table of block.querySelectorAll("table")) {
    const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  renderMath(block).catch(() => {});
  return block;
}
