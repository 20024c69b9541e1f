// One answer: streamed text, reasoning, tool calls, log probabilities and speed.

import { make, seconds, count, $ } from "./dom.js";

const FENCE = /```[^\n]*\n([\s\S]*?)(?:```|$)/g;

/** Format a text with code blocks. */
export function formatted(text) {
  const result = document.createDocumentFragment();
  let end = 0;
  for (const match of text.matchAll(FENCE)) {
    result.append(text.slice(end, match.index));
    result.append(make("pre", { tabIndex: 0 }, match[1]));
    end = match.index + match[0].length;
  }
  result.append(text.slice(end));
  return result;
}

export class Answer {
  constructor(parent, onToolResult) {
    this.element = parent;
    this.text = "";
    this.toolCalls = [];
    this.tokens = [];
    this.finish = "";
    this.started = performance.now();
    this.first = this.last = null;
    this.received = 0;
    this.usage = null;
    this.onToolResult = onToolResult;
    this.thoughts = make("div", { className: "text" });
    this.details = make("details", { hidden: true }, make("summary", {}, "Reasoning"), this.thoughts);
    this.body = make("div", { className: "text busy" });
    this.calls = make("div");
    this.problem = make("p", { className: "error", hidden: true });
    this.speed = make("p", { className: "quiet speed" });
    parent.append(this.details, this.body, this.calls, this.problem, this.speed);
  }

  /** The message for the next request. */
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.toolCalls.length) message.tool_calls = this.toolCalls;
    return message;
  }

  addChat(choice) {
    const delta = choice.delta ?? {};
    this.addReasoning(delta.reasoning_content ?? delta.reasoning ?? "");
    this.addText(delta.content ?? "");
    for (const call of delta.tool_calls ?? []) this.addToolCall(call);
    for (const token of choice.logprobs?.content ?? []) {
      this.tokens.push({ text: token.token, logprob: token.logprob, others: token.top_logprobs ?? [] });
    }
    this.finish = choice.finish_reason ?? this.finish;
  }

  addCompletion(choice) {
    this.addText(choice.text ?? "");
    const { tokens = [], token_logprobs = [], top_logprobs = [] } = choice.logprobs ?? {};
    tokens.forEach((text, i) => this.tokens.push({
      text, logprob: token_logprobs[i],
      others: Object.entries(top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
    }));
    this.finish = choice.finish_reason ?? this.finish;
  }

  addText(text) {
    if (!text) return;
    this.arrived();
    this.text += text;
    this.body.append(text);
  }

  addReasoning(text) {
    if (!text) return;
    this.arrived();
    this.details.hidden = false;
    this.thoughts.append(text);
  }

  addToolCall(delta) {
    this.arrived();
    const call = this.toolCalls[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    call.id = delta.id ?? call.id;
    call.function.name += delta.function?.name ?? "";
    call.function.arguments += delta.function?.arguments ?? "";
  }

  arrived() {
    this.last = performance.now();
    this.first ??= this.last;
    this.received += 1;
    if (this.received % 8 === 1) this.showSpeed();
  }

  fail(error) {
    this.problem.textContent = error;
    this.problem.hidden = false;
  }

  /** Show the parts that need the complete answer. */
  end() {
    this.body.classList.remove("busy");
    if (this.tokens.length) this.body.replaceChildren(coloured(this.tokens));
    else this.body.replaceChildren(formatted(this.text));
    this.calls.replaceChildren(...this.toolCalls.filter(Boolean).map((call) => this.toolCall(call)));
    this.showSpeed();
  }

  toolCall(call) {
    const field = make("textarea", { rows: 2, spellcheck: false, "aria-label": `Result of ${call.function.name}` });
    const send = make("button", { type: "button" }, "Send result");
    send.addEventListener("click", () => { send.disabled = true; this.onToolResult(call, field.value); });
    return make("div", { className: "tool" }, make("b", {}, call.function.name),
      make("pre", { tabIndex: 0 }, call.function.arguments), field, send);
  }

  showSpeed() {
    if (this.first === null) return;
    const tokens = this.usage?.completion_tokens ?? this.received;
    const parts = [`first token ${seconds((this.first - this.started) / 1000)}`];
    const duration = (this.last - this.first) / 1000;
    if (tokens > 1 && duration > 0) parts.push(`${((tokens - 1) / duration).toFixed(1)} tokens/s`);
    parts.push(`${count(tokens)} tokens`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`);
    }
    if (this.finish && this.finish !== "stop") parts.push(`ended by ${this.finish}`);
    this.speed.textContent = parts.join(" · ");
  }
}

/** Tokens coloured by probability (the less likely, the stronger), with alternatives on hover and arrow keys. */
function coloured(tokens) {
  const spans = tokens.map((token, i) => {
    const span = make("span", {}, token.text);
    span.dataset.at = i;
    const strength = Math.round(70 * (1 - Math.exp(token.logprob)));
    span.style.background = `color-mix(in srgb, var(--second) ${strength}%, transparent)`;
    return span;
  });
  const group = make("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens (arrow keys show alternatives)" }, ...spans);
  let at = -1;
  const select = (i) => {
    spans[at]?.classList.remove("at");
    at = Math.max(-1, Math.min(i, spans.length - 1));
    spans[at]?.classList.add("at");
    if (at >= 0) showTip(spans[at], tokens[at]);
    else hideTip();
  };
  group.addEventListener("pointerover", ({ target }) => { if (target.dataset.at) select(Number(target.dataset.at)); });
  group.addEventListener("pointerleave", () => select(-1));
  group.addEventListener("blur", () => select(-1));
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); select(at + step); }
    if (event.key === "Escape") select(-1);
  });
  return group;
}

function showTip(span, token) {
  const rows = [{ token: token.text, logprob: token.logprob }, ...token.others.filter((one) => one.token !== token.text)];
  const table = make("table", {}, ...rows.map((one, i) => {
    const share = Math.exp(one.logprob);
    const meter = make("meter", { value: share, max: 1, "aria-label": "probability" });
    return make("tr", {}, make("td", {}, make(i ? "span" : "b", {}, JSON.stringify(one.token))),
      make("td", {}, meter), make("td", {}, `${(100 * share).toFixed(1)} %`));
  }));
  const tip = $("tip"), place = span.getBoundingClientRect();
  tip.replaceChildren(table);
  tip.hidden = false;
  tip.style.left = `${Math.min(place.left, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = place.bottom + tip.offsetHeight + 8 > innerHeight ? `${place.top - tip.offsetHeight - 6}px` : `${place.bottom + 6}px`;
}

const hideTip = () => { $("tip").hidden = true; };
