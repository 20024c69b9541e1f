// An answer: reasoning, text, tool calls, problems, figures and actions.

import { MarkdownView } from "../render/markdown.js";
import { tokensView } from "../render/tokens.js";
import { copyFrom } from "../ui/clipboard.js";
import { icon } from "../ui/icons.js";
import { iconButton, make } from "../ui/dom.js";
import { count, rate, seconds } from "../ui/format.js";
import { branchSwitch } from "./branches.js";
import { CUT, FAILED, STOPPED } from "./generate.js";
import { toolCallView } from "./tool_call.js";

/** Finish of an answer that filled the model's context. */
const FULL = "full";
const PROBLEMS = {
  [CUT]: ["The answer was cut.", "The stream ended without its end marker: the server, a proxy or the network closed it. Continue or try again."],
  [FAILED]: ["The request failed.", ""],
  length: ["The answer reached its maximum length.", "Continue it, or raise max_tokens in the settings."],
  [FULL]: ["The context is full.", "Start a new conversation, or edit an earlier message."],
};

/** Time between two drawings, in multiples of the last one's duration. */
const IDLE_SHARE = 3;

export class AnswerView {
  constructor(conversation, message, actions) {
    Object.assign(this, { conversation, message, actions });
    this.showsTokens = true;
    this.summary = make("summary", {}, "Reasoning");
    this.thoughts = make("div", { className: "thoughts" });
    this.details = make("details", { className: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.text = make("div", { className: "text" });
    this.prose = new MarkdownView(this.text);
    this.tokens = make("div", { className: "token-text", hidden: true });
    this.calls = make("div", { className: "calls" });
    this.problem = make("div", { className: "problem", role: "alert", hidden: true });
    this.foot = make("div", { className: "foot" });
    this.element = make("article", { className: "message assistant", "aria-label": "Answer" },
      make("p", { className: "who" }, message.model), this.details, this.text, this.tokens, this.calls, this.problem, this.foot);
    this.update();
  }

  get isRunning() {
    return Boolean(this.conversation.running) && this.message.finish === null;
  }

  get finish() {
    const { finish, stats } = this.message;
    if (finish === "length" && stats?.context && stats.prompt + stats.tokens >= stats.context) return FULL;
    return finish ?? CUT;
  }

  /** Draw at the next frame, or later if drawing takes long, so that most of the time is left to the browser. */
  update() {
    if (this.waits) return;
    this.waits = true;
    setTimeout(() => requestAnimationFrame(() => {
      const started = performance.now();
      this.waits = false;
      this.draw();
      this.cost = performance.now() - started;
    }), IDLE_SHARE * (this.cost ?? 0));
  }

  draw() {
    const { message, isRunning } = this;
    this.element.classList.toggle("busy", isRunning);
    this.drawReasoning();
    this.prose.show(message.content, isRunning);
    this.drawTokens();
    if (!isRunning) this.drawEnd();
    else this.foot.replaceChildren(this.figures());
    this.actions.drawn();
  }

  drawReasoning() {
    const { reasoning, thoughtSeconds, content } = this.message;
    this.details.hidden = !reasoning;
    if (!reasoning) return;
    const thinks = this.isRunning && !content;
    this.summary.textContent = thinks ? "Reasoning…" : `Reasoned for ${seconds(thoughtSeconds ?? 0)}`;
    this.thinking ??= new MarkdownView(this.thoughts);
    this.thinking.show(reasoning, thinks);
  }

  drawTokens() {
    const { tokens, content } = this.message;
    const shows = !this.isRunning && Boolean(tokens?.length) && this.showsTokens;
    this.text.hidden = shows;
    this.tokens.hidden = !shows;
    if (shows && !this.tokens.firstChild) this.tokens.append(tokensView(content, tokens));
    if (this.isRunning) this.tokens.replaceChildren();
  }

  drawEnd() {
    const { message, conversation, actions } = this;
    const answered = new Map(conversation.path().filter((one) => one.role === "tool").map((one) => [one.toolCallId, one]));
    const calls = (message.toolCalls ?? []).filter(Boolean);
    if (this.calls.childElementCount !== calls.length) {
      this.calls.replaceChildren(...calls.map((call) => toolCallView(call, (result) => actions.toolResult(message, call, result))));
    }
    calls.forEach((call, i) => this.calls.children[i].classList.toggle("answered", answered.has(call.id)));
    this.drawProblem();
    const copy = iconButton("copy", "Copy", () => copyFrom(copy, message.content));
    const buttons = [branchSwitch(conversation, message, actions), copy, iconButton("again", "Regenerate", () => actions.regenerate(message))];
    if (message.content && [CUT, STOPPED, "length"].includes(this.finish) && conversation.record.leaf === message.id) {
      buttons.push(iconButton("resume", "Continue", () => actions.resume(message), { compact: false, className: "plain" }));
    }
    if (message.tokens?.length) {
      const toggle = iconButton("tokens", "Token probabilities", () => { this.showsTokens = !this.showsTokens; this.draw(); });
      toggle.setAttribute("aria-pressed", String(this.showsTokens));
      buttons.push(toggle);
    }
    const focused = this.foot.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.foot.replaceChildren(...buttons.filter(Boolean), this.figures());
    if (focused) this.foot.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  drawProblem() {
    const { finish, message: { error } } = this;
    const [title, hint] = PROBLEMS[finish] ?? [];
    this.problem.hidden = !title;
    if (!title) return;
    this.problem.classList.toggle("mild", ["length", FULL].includes(finish));
    this.problem.replaceChildren(icon("alert"), make("div", {}, make("b", {}, error?.message ?? title), make("p", {}, error?.hint || hint)));
  }

  figures() {
    const { stats, finish } = this.message;
    if (!stats) return make("span", { className: "quiet speed" });
    const parts = [stats.speed === null ? "" : `${rate(stats.speed)} tokens/s`, `first token ${seconds(stats.firstToken)}`, `${count(stats.tokens)} tokens`];
    if (stats.prompt !== null) parts.push(`prompt ${count(stats.prompt)}${stats.cached ? `, ${count(stats.cached)} cached` : ""}`);
    if (finish === STOPPED) parts.push("stopped");
    return make("span", { className: "quiet speed" }, parts.filter(Boolean).join(" · "));
  }
}
