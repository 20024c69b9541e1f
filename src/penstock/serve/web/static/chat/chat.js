// The chat: the shown conversation, and what its buttons do.

import { chooseModel, currentName, hasModel } from "../api/models.js";
import * as history from "../store/history.js";
import { Conversation } from "../store/conversation.js";
import { $ } from "../ui/dom.js";
import { isNarrow, setPanel } from "../ui/panels.js";
import { toastError } from "../ui/toast.js";
import { takeImages } from "./attachments.js";
import * as composer from "./composer.js";
import { generate } from "./generate.js";
import { adapt, requestFor, startSettings } from "./settings.js";
import { startShowCode } from "./show_code.js";
import { drawList, showCurrent, startSidebar } from "./sidebar.js";
import { drawThread, forget, startThread, toEnd, updateMessage, viewOf } from "./thread.js";

let shown = new Conversation();
/** Conversations with a running answer, by id: it continues while another one is shown. */
const running = new Map();

/** Time between saves of a running answer in milliseconds, so that a closed page keeps most of it. */
const SAVE_INTERVAL = 2000;
let savedAt = -Infinity;

const actions = { edit, select, regenerate, resume, toolResult, example };

export function startChat() {
  startSettings(adaptToModel);
  startThread();
  composer.startComposer({ send, stop });
  startSidebar({ open, removed: (id) => { if (shown.id === id) startNew(); }, renamed: (id, title) => { if (shown.id === id) shown.record.title = title; draw(); } }, (id) => running.has(id));
  startShowCode(() => shown);
  $("new-chat").addEventListener("click", startNew);
  draw();
  showCurrent(shown.id);
}

/** Adapt the controls to the chosen model. */
export function adaptToModel() {
  adapt();
  composer.showState(shown);
  if (!shown.path().length) draw();
}

export function startNew() {
  show(new Conversation());
  if (isNarrow()) setPanel("sidebar", false);
  $("prompt").focus();
}

export async function open(id) {
  const conversation = running.get(id) ?? await history.load(id);
  if (!conversation) return startNew();
  show(conversation);
  if (hasModel(conversation.record.model)) chooseModel(conversation.record.model);
  if (isNarrow()) setPanel("sidebar", false);
}

function show(conversation) {
  location.hash = "";
  shown = conversation;
  draw();
  toEnd();
  showCurrent(shown.id);
}

function draw() {
  $("chat-title").textContent = shown.title;
  document.title = shown.record.title ? `${shown.record.title} · Penstock` : "Penstock";
  drawThread(shown, actions);
  composer.showState(shown);
}

function example(prompt) {
  composer.setText(prompt);
  send();
}

function send() {
  if (shown.running || composer.isEmpty() || !isValid()) return;
  const text = $("prompt").value;
  const images = takeImages().map((url) => shown.addImage(url));
  const message = shown.add({ role: "user", content: text, images: images.map((image) => image.id) });
  composer.setText("");
  run(shown, { added: [message], images });
}

/** Check the settings before a message is added; shows the error. */
function isValid() {
  try {
    requestFor(shown, []);
    return true;
  } catch (error) {
    refuse(error);
    return false;
  }
}

const refuse = (error) =>
  toastError(error, { hint: "Correct the value in the settings.", action: { label: "Settings", run: () => setPanel("settings", true) } });

/** Stop the running answer. Returns false if there is none. */
export function stop() {
  if (!shown.running) return false;
  shown.running.abort();
  return true;
}

/** Send an edited message as another branch. */
function edit(message, text) {
  if (!isValid()) return;
  if (shown.running) stop();
  forget(message);
  const added = shown.add({ role: "user", content: text, images: message.images }, message.parent);
  run(shown, { added: [added] });
}

export function editLast() {
  const last = shown.path().findLast((message) => message.role === "user");
  if (!last || shown.running) return false;
  viewOf(last).edit();
  return true;
}

function select(message) {
  shown.select(message);
  draw();
  history.save(shown);
}

/** Generate another answer as another branch. */
function regenerate(message) {
  if (shown.running) return;
  shown.record.leaf = message.parent;
  run(shown);
}

function resume(message) {
  if (!shown.running) run(shown, { continued: message });
}

function toolResult(message, call, content) {
  const added = shown.add({ role: "tool", toolCallId: call.id, name: call.function.name, content });
  const answered = new Set(shown.path().map((one) => one.toolCallId));
  if (message.toolCalls.every((one) => answered.has(one.id))) return run(shown, { added: [added] });
  draw();
  return history.save(shown, { messages: [added] });
}

/** Generate an answer, and save it with the messages that were added before. */
async function run(conversation, { added = [], images = [], continued = null } = {}) {
  const leaf = conversation.record.leaf;
  conversation.record.model = currentName();
  running.set(conversation.id, conversation);
  let messages = [];
  savedAt = -Infinity;
  try {
    await history.save(conversation, { messages: added, images });
    const generating = generate(conversation, { continued, onChange: (message) => changed(conversation, message) });
    toEnd();
    drawList();
    messages = await generating;
  } catch (error) {
    conversation.record.leaf = leaf;
    refuse(error);
  }
  running.delete(conversation.id);
  await history.save(conversation, { messages });
  if (conversation === shown) draw();
  drawList();
}

/** Save and draw a change of a running answer. */
function changed(conversation, message) {
  if (performance.now() - savedAt > SAVE_INTERVAL) {
    savedAt = performance.now();
    history.save(conversation, { messages: [message] });
  }
  if (conversation !== shown) return;
  if (!viewOf(message)) draw();
  else updateMessage(message);
}
