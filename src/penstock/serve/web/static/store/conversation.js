// A conversation: a tree of messages, of which one path is shown. Edits and new answers add branches.

const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const TITLE_LENGTH = 60;

export class Conversation {
  /** `record`: {id, title, created, updated, model, leaf}; `messages`: in any order, kept oldest first. */
  constructor(record = null, messages = []) {
    const now = Date.now();
    this.record = record ?? { id: newId(), title: "", created: now, updated: now, model: "", leaf: null };
    this.messages = new Map(messages.sort((a, b) => a.created - b.created).map((message) => [message.id, message]));
    this.images = new Map();
    this.running = null;
  }

  get id() { return this.record.id; }
  get title() { return this.record.title || "New conversation"; }

  /** Messages from the first one to the end of the shown branch. */
  path(end = this.record.leaf) {
    const found = [];
    for (let message = this.messages.get(end); message; message = this.messages.get(message.parent)) found.push(message);
    return found.reverse();
  }

  /** Add a message after `parent`, and show it. Two messages never have the same time, so that it gives their order. */
  add(message, parent = this.record.leaf) {
    const created = Math.max(Date.now(), this.record.updated + 1);
    const added = { id: newId(), conversation: this.id, parent, created, content: "", images: [], ...message };
    this.messages.set(added.id, added);
    this.record.leaf = added.id;
    this.record.updated = added.created;
    if (!this.record.title && added.role === "user") this.record.title = titleOf(added.content);
    return added;
  }

  /** Alternatives of a message: messages with the same parent, oldest first. */
  siblings(message) {
    return this.children(message.parent);
  }

  children(parent) {
    return [...this.messages.values()].filter((one) => one.parent === parent);
  }

  /** Show the branch of a message, to the end of its newest replies. */
  select(message) {
    let end = message;
    for (let next = this.children(end.id); next.length; next = this.children(end.id)) end = next.at(-1);
    this.record.leaf = end.id;
  }

  addImage(url) {
    const image = { id: newId(), conversation: this.id, url };
    this.images.set(image.id, image);
    return image;
  }
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/^[#>*\s`-]+/, "") || "Image";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line;
}
