// The input: a text field that grows with its text, and its buttons.

import { currentModel } from "../api/models.js";
import { $ } from "../ui/dom.js";
import { count } from "../ui/format.js";
import { hasImages, startAttachments } from "./attachments.js";
import { mode } from "./settings.js";

const MAX_HEIGHT = 0.4;

export function startComposer({ send, stop }) {
  startAttachments();
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("input", fit);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", stop);
}

export const isEmpty = () => !$("prompt").value.trim() && !hasImages();

export function setText(text) {
  $("prompt").value = text;
  fit();
  $("prompt").focus();
}

/** Fit the field's height to its text. */
function fit() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight * MAX_HEIGHT)}px`;
}

/** Show the state of the conversation and the capabilities of the model. */
export function showState(conversation) {
  const model = currentModel(), isChat = mode() === "chat", running = Boolean(conversation.running);
  $("send").hidden = running;
  $("stop").hidden = !running;
  $("attach").hidden = !(isChat && model?.images);
  $("mode-chip").hidden = isChat;
  $("prompt").placeholder = isChat ? "Message" : "Text to continue";
  const stats = conversation.path().findLast((message) => message.stats)?.stats;
  const used = stats?.prompt ? stats.prompt + stats.tokens : 0;
  $("context").textContent = used && model?.context ? `${count(used)} of ${count(model.context)} tokens` : "";
  $("context").classList.toggle("full", used > 0.9 * (model?.context ?? Infinity));
}
