// Generation of answers: the request, its stream, and how it ends.

import { stream, StreamCut } from "../api/stream.js";
import { currentName } from "../api/models.js";
import { AnswerState } from "./answer_state.js";
import { requestFor } from "./settings.js";

/** Finish of an answer whose stream had no end marker. */
export const CUT = "cut";
/** Finish of an answer that the user stopped. */
export const STOPPED = "user";
export const FAILED = "error";

/**
 * Generate the reply to the shown branch, or continue its last answer.
 *
 * `onChange(message)` is called for each change. Throws an Error for invalid settings, before anything changes. Returns the
 * messages, of which there are several if the parameter n is set.
 */
export async function generate(conversation, { continued = null, onChange }) {
  const [path, body] = requestFor(conversation, conversation.path(), { continues: Boolean(continued) });
  const isChat = path.endsWith("chat/completions"), parent = conversation.record.leaf;
  const states = new Map();
  const stateOf = (index) => {
    if (!states.has(index)) {
      const message = continued ?? conversation.add({ role: "assistant", model: currentName(), finish: null }, parent);
      states.set(index, new AnswerState(message));
      conversation.record.leaf = states.get(0).message.id;
    }
    return states.get(index);
  };
  if (continued) Object.assign(continued, { finish: null, error: null });
  stateOf(0);
  conversation.running = new AbortController();
  onChange(stateOf(0).message);
  let end = CUT, failure = null;
  try {
    for await (const event of stream(path, body, conversation.running.signal)) {
      for (const choice of event.choices ?? []) {
        const state = stateOf(choice.index ?? 0);
        state.add(choice, isChat);
        onChange(state.message);
      }
      if (event.usage && states.size === 1) stateOf(0).usage = event.usage;
    }
  } catch (error) {
    if (error.name === "AbortError") end = STOPPED;
    else if (!(error instanceof StreamCut)) [end, failure] = [FAILED, { message: error.message, hint: error.hint ?? "" }];
  }
  conversation.running = null;
  const messages = [...states.values()].map((state) => {
    state.measure();
    state.message.finish ??= end;
    if (end === FAILED) Object.assign(state.message, { finish: FAILED, error: failure });
    return state.message;
  });
  return messages;
}
