// The state of an answer while its stream arrives.

import { currentModel } from "../api/models.js";
import { tokensPerSecond } from "./speed.js";

const now = () => performance.now() / 1000;

/** Adds the chunks of a stream to a message. */
export class AnswerState {
  constructor(message) {
    this.message = message;
    this.started = now();
    this.first = this.last = null;
    this.received = 0;
    this.usage = null;
  }

  add(choice, isChat) {
    const { message } = this;
    const delta = isChat ? choice.delta ?? {} : { content: choice.text };
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (reasoning || delta.content || delta.tool_calls) this.arrived();
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (reasoning) message.thoughtSeconds = this.last - this.started;
    message.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) addToolCall(message, call);
    const tokens = isChat ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs);
    if (tokens.length) message.tokens = [...(message.tokens ?? []), ...tokens];
    message.finish = choice.finish_reason ?? message.finish;
  }

  arrived() {
    this.last = now();
    this.first ??= this.last;
    this.received += 1;
    this.measure();
  }

  /** Update the figures that are shown under the answer. */
  measure() {
    if (this.first === null) return;
    const tokens = this.usage?.completion_tokens ?? this.received;
    this.message.stats = {
      firstToken: this.first - this.started,
      speed: tokensPerSecond({ tokens, started: this.started, first: this.first, last: this.last }),
      tokens,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      context: currentModel()?.context ?? null,
    };
  }
}

function addToolCall(message, delta) {
  message.toolCalls ??= [];
  const call = message.toolCalls[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  call.id = delta.id ?? call.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

const chatTokens = (logprobs) => (logprobs?.content ?? []).map((token) => ({
  text: token.token, bytes: token.bytes, logprob: token.logprob,
  others: (token.top_logprobs ?? []).map((one) => ({ token: one.token, logprob: one.logprob })),
}));

function completionTokens(logprobs) {
  const { tokens = [], token_logprobs = [], top_logprobs = [] } = logprobs ?? {};
  return tokens.map((text, i) => ({
    text, bytes: null, logprob: token_logprobs[i],
    others: Object.entries(top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
  }));
}
