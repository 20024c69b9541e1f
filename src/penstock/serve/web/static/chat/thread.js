// The thread: the views of the shown branch, and scrolling.

import { $ } from "../ui/dom.js";
import { AnswerView } from "./answer_view.js";
import { ToolResultView, UserView } from "./message_view.js";
import { welcome } from "./welcome.js";

const VIEWS = { user: UserView, assistant: AnswerView, tool: ToolResultView };
const NEAR = 120;
let views = new Map(), shown = null;
let follows = true;

/** Draw the shown branch of a conversation. Views of messages are kept. */
export function drawThread(conversation, actions) {
  if (shown !== conversation) [views, shown, follows] = [new Map(), conversation, true];
  const drawing = { ...actions, drawn: keepInSight };
  const path = conversation.path();
  for (const message of path) {
    if (!views.has(message.id)) views.set(message.id, new VIEWS[message.role](conversation, message, drawing));
    else views.get(message.id).update();
  }
  $("log").setAttribute("aria-busy", String(Boolean(conversation.running)));
  $("log").classList.toggle("empty", !path.length);
  $("log").replaceChildren(...(path.length ? path.map((message) => views.get(message.id).element) : [welcome(actions.example)]));
}

/** Discard the view of a message, so that it is drawn again. */
export const forget = (message) => views.delete(message.id);
export const viewOf = (message) => views.get(message.id);
export const updateMessage = (message) => views.get(message.id)?.update();

/** Scroll to the end, and follow what is written. */
export function toEnd() {
  follows = true;
  keepInSight();
}

function keepInSight() {
  if (follows) $("log").scrollTop = $("log").scrollHeight;
  showButton();
}

const isNearEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < NEAR;
const showButton = () => { $("to-end").hidden = isNearEnd(); };

export function startThread() {
  $("log").addEventListener("scroll", () => { follows = isNearEnd(); showButton(); });
  $("to-end").addEventListener("click", toEnd);
}
