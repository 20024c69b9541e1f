// The playground: conversation, request parameters and answers.

import { stream } from "./api.js";
import { Answer, formatted } from "./answer.js";
import { asCurl, asPython } from "./code.js";
import { $, make, notify } from "./dom.js";
import { addParameters, readParameters } from "./parameters.js";

const TOP_LOGPROBS = 5;
const MAX_IMAGE_SIZE = 20e6;

let models = new Map();
let conversation = [];
let images = [];
let running = null;

export function start() {
  addParameters($("parameters"));
  restoreSettings();
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("again").addEventListener("click", again);
  $("clear").addEventListener("click", () => { running?.abort(); conversation = []; images = []; draw(); });
  $("reset").addEventListener("click", () => { $("form").reset(); changed(); });
  $("form").addEventListener("input", changed);
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("show-code").addEventListener("click", showCode);
  $("model").addEventListener("change", adapt);
  $("files").addEventListener("change", ({ target }) => { addImages(target.files); target.value = ""; });
  $("prompt").addEventListener("paste", ({ clipboardData }) => addImages(clipboardData.files));
  $("composer").addEventListener("dragover", (event) => event.preventDefault());
  $("composer").addEventListener("drop", (event) => { event.preventDefault(); addImages(event.dataTransfer.files); });
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy($(button.dataset.copy)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
    const typing = event.target.closest("input, textarea, select, dialog");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !$("playground").hidden) {
      event.preventDefault();
      $("prompt").focus();
    }
  });
}

/** Set the list of models. */
export function setModels(list) {
  const chosen = $("model").value;
  models = new Map(list.flatMap((model) => model.names.map((name) => [name, model])));
  $("model").replaceChildren(...[...models.keys()].map((name) => make("option", { value: name }, name)));
  if (models.has(chosen)) $("model").value = chosen;
  adapt();
}

/** Adapt the controls to the capabilities of the model. */
function adapt() {
  const model = models.get($("model").value);
  const isChat = mode() === "chat";
  if (model && !model.chat && isChat) {
    $("form").elements.mode.value = "completion";
    return adapt();
  }
  $("attach").hidden = !(isChat && model?.images);
  for (const one of document.querySelectorAll(".chat-only")) one.hidden = !isChat;
  $("form").elements.tools.disabled = model ? !model.tools : false;
  $("form").elements.thinking.closest("label").hidden = !(isChat && model?.reasoning);
  $("prompt").placeholder = isChat ? "Message (Enter: send, Shift+Enter: new line)" : "Text to continue";
}

const mode = () => $("form").elements.mode.value;

function changed() {
  adapt();
  for (const name of ["schema", "tools"]) {
    const field = $("form").elements[name];
    let wrong = "";
    try { if (field.value.trim()) JSON.parse(field.value); } catch (error) { wrong = error.message; }
    field.classList.toggle("invalid", Boolean(wrong));
    field.setCustomValidity(wrong);
    field.title = wrong;
  }
  const values = Object.fromEntries([...$("form").elements].filter((one) => one.name && one.type !== "radio")
    .map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value]));
  sessionStorage.setItem("penstock-settings", JSON.stringify({ ...values, mode: mode() }));
}

function restoreSettings() {
  const values = JSON.parse(sessionStorage.getItem("penstock-settings") ?? "{}");
  for (const [name, value] of Object.entries(values)) {
    const field = $("form").elements[name];
    if (!field) continue;
    if (typeof value === "boolean") field.checked = value;
    else field.value = value;
  }
}

/** The current request as [path, body]. Throws an Error for invalid input. */
function request() {
  const fields = $("form").elements;
  const body = { model: $("model").value, ...readParameters($("form")), stream: true, stream_options: { include_usage: true } };
  for (const name of ["schema", "tools"]) {
    if (!fields[name].validity.valid) throw new Error(`${name}: not valid JSON: ${fields[name].validationMessage}`);
  }
  if (fields.schema.value.trim()) {
    const schema = JSON.parse(fields.schema.value);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (mode() === "completion") {
    if (fields.logprobs.checked) body.logprobs = TOP_LOGPROBS;
    return ["v1/completions", { ...body, prompt: conversation.map((one) => textOf(one.message.content)).join("") }];
  }
  if (fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  if (fields.tools.value.trim() && !fields.tools.disabled) body.tools = JSON.parse(fields.tools.value);
  if (models.get($("model").value)?.reasoning && !fields.thinking.checked) {
    body.chat_template_kwargs = { enable_thinking: false };
  }
  const system = fields.system.value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation.map((one) => one.message)];
  return ["v1/chat/completions", { ...body, messages }];
}

/** The text of a message without images. */
const textOf = (content) => typeof content === "string" ? content : content.filter((part) => part.text).map((part) => part.text).join("");

function userMessage() {
  const text = $("prompt").value;
  if (!images.length) return { role: "user", content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text }] };
}

function send() {
  if (running || !($("prompt").value.trim() || images.length)) return;
  conversation.push({ message: userMessage() });
  try {
    request();
  } catch (error) {
    conversation.pop();
    return notify(error.message);
  }
  $("prompt").value = "";
  images = [];
  generate();
}

function again() {
  while (conversation.length && conversation.at(-1).message.role === "assistant") conversation.pop();
  generate();
}

async function generate() {
  notify("");
  let path, body;
  try {
    [path, body] = request();
  } catch (error) {
    draw();
    return notify(error.message);
  }
  draw();
  running = new AbortController();
  const begunWith = conversation;
  buttons();
  const answers = new Map();
  const answerOf = (index) => {
    if (!answers.has(index)) {
      const element = make("article", { className: "message assistant" }, make("p", { className: "who" }, body.n > 1 ? `${body.model} ${index + 1}` : body.model));
      $("log").append(element);
      answers.set(index, new Answer(element, toolResult));
    }
    return answers.get(index);
  };
  answerOf(0);
  try {
    for await (const event of stream(path, body, running.signal)) {
      for (const choice of event.choices ?? []) {
        const answer = answerOf(choice.index ?? 0);
        path.endsWith("chat/completions") ? answer.addChat(choice) : answer.addCompletion(choice);
      }
      if (event.usage && answers.size === 1) answerOf(0).usage = event.usage;
      keepInSight();
    }
  } catch (error) {
    if (error.name !== "AbortError") answerOf(0).fail(error.message);
    else answerOf(0).finish = "user";
  }
  running = null;
  for (const answer of answers.values()) answer.end();
  const first = answers.get(0);
  if (conversation === begunWith && (first.text || first.toolCalls.length)) {
    conversation.push({ message: first.message, element: first.element });
  }
  buttons();
  keepInSight();
}

function toolResult(call, content) {
  conversation.push({ message: { role: "tool", tool_call_id: call.id, content } });
  const answered = new Set(conversation.map((one) => one.message.tool_call_id));
  const asked = conversation.findLast((one) => one.message.tool_calls)?.message.tool_calls ?? [];
  if (!running && asked.every((one) => answered.has(one.id))) generate();
}

/** Draw the conversation; answers reuse their elements. */
function draw() {
  $("log").replaceChildren(...conversation.map((one, i) => one.element ?? drawMessage(one, i)));
  $("images").replaceChildren(...images.map((url, i) => {
    const button = make("button", { type: "button", "aria-label": `Remove image ${i + 1}` }, make("img", { src: url, alt: "" }));
    button.addEventListener("click", () => { images.splice(i, 1); draw(); });
    return button;
  }));
  buttons();
}

function drawMessage(entry, i) {
  const { role, content } = entry.message;
  const edit = make("button", { type: "button" }, "Edit");
  edit.addEventListener("click", () => {
    $("prompt").value = typeof content === "string" ? content : content.at(-1).text;
    images = typeof content === "string" ? [] : content.filter((part) => part.image_url).map((part) => part.image_url.url);
    running?.abort();
    conversation = conversation.slice(0, i);
    draw();
    $("prompt").focus();
  });
  const text = make("div", { className: "text" });
  for (const part of typeof content === "string" ? [{ text: content }] : content) {
    text.append(part.image_url ? make("img", { src: part.image_url.url, alt: "image of the message" }) : formatted(part.text));
  }
  return entry.element = make("article", { className: `message ${role}` }, make("p", { className: "who" }, role === "user" ? "you" : role, ...(role === "user" ? [edit] : [])), text);
}

function buttons() {
  $("send").disabled = Boolean(running);
  $("stop").disabled = !running;
  $("again").disabled = Boolean(running) || !conversation.length;
}

function keepInSight() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 200) log.scrollTop = log.scrollHeight;
}

function addImages(files) {
  if ($("attach").hidden) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MAX_IMAGE_SIZE) { notify(`${file.name} is larger than ${MAX_IMAGE_SIZE / 1e6} MB.`); continue; }
    const reader = new FileReader();
    reader.addEventListener("load", () => { images.push(reader.result); draw(); });
    reader.readAsDataURL(file);
  }
}

function showCode() {
  const before = conversation.length;
  try {
    if ($("prompt").value.trim() || images.length) conversation.push({ message: userMessage() });
    const [path, body] = request();
    $("curl").textContent = asCurl(path, body);
    $("python").textContent = asPython(path, body);
    $("code-dialog").showModal();
  } catch (error) {
    notify(error.message);
  } finally {
    conversation.length = before;
  }
}

/** Copy an element's text. Without the clipboard API (plain HTTP), select and copy it. */
function copy(element) {
  if (navigator.clipboard) return navigator.clipboard.writeText(element.textContent);
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}
