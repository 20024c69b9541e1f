// A message of the user, or the result of a tool.

import { MarkdownView } from "../render/markdown.js";
import { copyFrom } from "../ui/clipboard.js";
import { iconButton, make } from "../ui/dom.js";
import { branchSwitch } from "./branches.js";

/** A message of the user, which can be edited: the edited message starts another branch. */
export class UserView {
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.element = make("article", { className: "message user", "aria-label": "You" });
    this.show();
  }

  show() {
    const { content, images } = this.message;
    const text = make("div", { className: "text" });
    new MarkdownView(text).show(content);
    const pictures = images.map((id) => make("img", { src: this.conversation.images.get(id).url, alt: "Attached image" }));
    const copy = iconButton("copy", "Copy", () => copyFrom(copy, content));
    this.foot = make("div", { className: "foot" });
    this.element.replaceChildren(make("div", { className: "bubble" }, pictures.length ? make("div", { className: "pictures" }, ...pictures) : null, content ? text : null), this.foot);
    const edit = iconButton("edit", "Edit", () => this.edit());
    this.update = () => this.foot.replaceChildren(...[branchSwitch(this.conversation, this.message, this.actions), copy, edit].filter(Boolean));
    this.update();
  }

  edit() {
    const field = make("textarea", { value: this.message.content, rows: 3, "aria-label": "Edit the message" });
    const cancel = () => { this.show(); this.foot.querySelector("[aria-label=Edit]").focus(); };
    const save = () => this.actions.edit(this.message, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    this.element.replaceChildren(make("div", { className: "editor" }, field, make("div", { className: "row end" },
      make("span", { className: "quiet" }, "The old branch is kept."),
      make("button", { type: "button", onclick: cancel }, "Cancel"),
      make("button", { type: "button", className: "primary", onclick: save }, "Send"))));
    this.update = () => {};
    field.focus();
  }
}

/** The result of a tool, folded. */
export class ToolResultView {
  constructor(conversation, message) {
    this.element = make("article", { className: "message tool-result", "aria-label": "Tool result" },
      make("details", {}, make("summary", {}, `Result of ${message.name}`), make("pre", { tabIndex: 0 }, message.content)));
  }

  update() {}
}
