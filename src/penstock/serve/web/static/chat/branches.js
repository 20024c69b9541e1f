// Buttons that switch between the branches of a message.

import { iconButton, make } from "../ui/dom.js";

/** "‹ 2 / 3 ›"; null if the message has no alternatives. */
export function branchSwitch(conversation, message, actions) {
  const siblings = conversation.siblings(message).filter((one) => one.role === message.role);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const step = (name, label, move) => {
    const button = iconButton(name, label, () => actions.select(siblings[at + move]));
    button.disabled = !siblings[at + move];
    return button;
  };
  return make("span", { className: "branches", role: "group", "aria-label": "Branches" },
    step("left", "Previous branch", -1), make("span", {}, `${at + 1} / ${siblings.length}`), step("right", "Next branch", 1));
}
