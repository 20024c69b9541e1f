// Tokens coloured by probability, with the alternatives of each token.

import { $, make } from "../ui/dom.js";
import { alignTokens } from "./logprobs.js";

const NO_BYTES = "This API reports no bytes: characters that consist of several tokens are shown as �, and special tokens by name.";
const NOT_ALIGNED = "The tokens are shown as the model wrote them: the answer's text was changed after generation.";

/** An element with the tokens of an answer. */
export function tokensView(text, tokens) {
  const hasBytes = tokens.every((token) => token.bytes);
  const aligned = alignTokens(text, tokens);
  const spans = aligned ?? tokens.map((token) => ({ text: token.text, tokens: [token] }));
  const note = !hasBytes ? NO_BYTES : aligned ? "" : NOT_ALIGNED;
  const view = make("div", {}, coloured(spans));
  if (note) view.append(make("p", { className: "quiet token-note" }, note));
  return view;
}

/** The less likely a token, the stronger its colour. Hovering, a click and the arrow keys show the alternatives. */
function coloured(spans) {
  const elements = spans.map(({ text, tokens }, i) => {
    const element = make("span", {}, text);
    element.dataset.at = i;
    const likely = Math.min(...tokens.map((token) => Math.exp(token.logprob)));
    element.style.background = `color-mix(in srgb, var(--second) ${Math.round(70 * (1 - likely))}%, transparent)`;
    return element;
  });
  const group = make("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens (arrow keys show alternatives)" }, ...elements);
  let at = -1;
  const select = (i) => {
    elements[at]?.classList.remove("at");
    at = Math.max(-1, Math.min(i, elements.length - 1));
    elements[at]?.classList.add("at");
    if (at >= 0) showTip(elements[at], spans[at].tokens);
    else hideTip();
  };
  const point = ({ target }) => { if (target.dataset.at) select(Number(target.dataset.at)); };
  group.addEventListener("pointerover", point);
  group.addEventListener("click", point);
  group.addEventListener("pointerleave", () => select(-1));
  group.addEventListener("blur", () => select(-1));
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); select(at + step); }
    if (event.key === "Escape" && at >= 0) { event.stopPropagation(); select(-1); }
  });
  return group;
}

function showTip(element, tokens) {
  const tip = $("tip"), place = element.getBoundingClientRect();
  tip.replaceChildren(...tokens.map(alternatives));
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = place.bottom + 6;
  tip.style.top = below + tip.offsetHeight > innerHeight ? `${place.top - tip.offsetHeight - 6}px` : `${below}px`;
}

function alternatives(token) {
  const others = token.others.filter((one) => one.token !== token.text);
  return make("table", {}, ...[{ token: token.text, logprob: token.logprob }, ...others].map((one, i) => {
    const share = Math.exp(one.logprob);
    return make("tr", {}, make("td", {}, make(i ? "span" : "b", {}, JSON.stringify(one.token))),
      make("td", {}, make("meter", { value: share, max: 1, "aria-label": "probability" })), make("td", {}, `${(100 * share).toFixed(1)} %`));
  }));
}

const hideTip = () => { $("tip").hidden = true; };
