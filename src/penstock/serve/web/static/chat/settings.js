// The settings of requests: form, validation, storage, and the request body.

import { currentModel, currentName } from "../api/models.js";
import { $ } from "../ui/dom.js";
import { store, stored } from "../ui/storage.js";
import { addParameters, readParameters } from "./parameters.js";

const TOP_LOGPROBS = 5;

const fields = () => $("form").elements;
export const mode = () => fields().mode.value;
export const wantsTokens = () => fields().logprobs.checked;

export function startSettings(onChange) {
  addParameters($("parameters"), $("more-parameters"));
  restore();
  const changed = () => { adapt(); save(); onChange(); };
  $("form").addEventListener("input", changed);
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", () => { $("form").reset(); changed(); });
}

/** Adapt the form to the model's capabilities. */
export function adapt() {
  const model = currentModel();
  if (model && !model.chat) fields().mode.value = "completion";
  const isChat = mode() === "chat";
  for (const one of document.querySelectorAll(".chat-only")) one.hidden = !isChat;
  fields().tools.disabled = model ? !model.tools : false;
  fields().thinking.closest("label").hidden = !(isChat && model?.reasoning);
  for (const name of ["schema", "tools"]) {
    const problem = jsonProblem(fields()[name].value);
    fields()[name].setCustomValidity(problem);
    fields()[name].title = problem;
  }
}

function jsonProblem(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

function save() {
  const values = [...fields()].filter((one) => one.name && one.type !== "radio").map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value]);
  store("settings", { ...Object.fromEntries(values), mode: mode() });
}

function restore() {
  for (const [name, value] of Object.entries(stored("settings", {}))) {
    const field = fields()[name];
    if (!field) continue;
    if (typeof value === "boolean") field.checked = value;
    else field.value = value;
  }
}

/** The request for messages of a conversation as [path, body]. Throws an Error for invalid settings. */
export function requestFor(conversation, path, { continues = false } = {}) {
  const body = { model: currentName(), ...readParameters($("form")), stream: true, stream_options: { include_usage: true } };
  for (const name of ["schema", "tools"]) {
    if (!fields()[name].validity.valid) throw new Error(`${name}: not valid JSON: ${fields()[name].validationMessage}`);
  }
  if (fields().schema.value.trim()) {
    const schema = JSON.parse(fields().schema.value);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (continues) delete body.n;
  if (mode() === "completion") {
    if (wantsTokens()) body.logprobs = TOP_LOGPROBS;
    return ["v1/completions", { ...body, prompt: path.map((message) => message.content).join("") }];
  }
  if (wantsTokens()) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  if (fields().tools.value.trim() && !fields().tools.disabled) body.tools = JSON.parse(fields().tools.value);
  const thinking = currentModel()?.reasoning && fields().thinking.value;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (continues) Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  const system = fields().system.value.trim();
  const messages = path.map((message) => asMessage(conversation, message));
  return ["v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] }];
}

function asMessage(conversation, { role, content, images, toolCalls, toolCallId }) {
  if (role === "tool") return { role, tool_call_id: toolCallId, content };
  if (role === "assistant") return { role, content, ...(toolCalls?.length && { tool_calls: toolCalls }) };
  if (!images.length) return { role, content };
  const parts = images.map((id) => ({ type: "image_url", image_url: { url: conversation.images.get(id).url } }));
  return { role, content: [...parts, { type: "text", text: content }] };
}
