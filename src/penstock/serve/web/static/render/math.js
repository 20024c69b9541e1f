// Mathematics: rules for marked, and rendering as MathML with Temml.

import { loadMath } from "./libraries.js";

const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])(?:\n+|$)/;
const INLINE = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?![\d\p{L}]))/u;

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const renderer = ({ tex, display }) => `<span class="math${display ? " display" : ""}">${escaped(tex)}</span>`;

/** Extensions of marked: $…$ and \(…\) in text, $$…$$ and \[…\] as blocks. */
export const mathExtensions = [
  {
    name: "mathBlock", level: "block", renderer,
    start: (source) => source.match(/\n(?:\$\$|\\\[)/)?.index,
    tokenizer(source) {
      const found = BLOCK.exec(source);
      return found ? { type: "mathBlock", raw: found[0], tex: (found[1] ?? found[2]).trim(), display: true } : undefined;
    },
  },
  {
    name: "mathInline", level: "inline", renderer,
    start: (source) => source.match(/\$|\\[([]/)?.index,
    tokenizer(source) {
      const found = INLINE.exec(source);
      if (!found) return undefined;
      const [raw, dollars, brackets, parentheses, dollar] = found;
      return { type: "mathInline", raw, tex: (dollars ?? brackets ?? parentheses ?? dollar).trim(), display: Boolean(dollars ?? brackets) };
    },
  },
];

/** Replace the formulas of an element by MathML. Their source stays until the library is loaded, and if it is wrong. */
export async function renderMath(element) {
  const formulas = [...element.querySelectorAll(".math")];
  if (!formulas.length) return;
  const temml = await loadMath();
  for (const formula of formulas) {
    const tex = formula.textContent;
    try {
      temml.render(tex, formula, { displayMode: formula.classList.contains("display"), throwOnError: true, trust: false, annotate: true });
    } catch {
      formula.textContent = tex;
      formula.classList.add("wrong");
      formula.title = "This formula has errors.";
    }
    if (formula.classList.contains("display")) formula.tabIndex = 0;
  }
}
