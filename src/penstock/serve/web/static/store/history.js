// Saved conversations: list, search, load, save, delete and restore.

import { Conversation } from "./conversation.js";
import * as database from "./database.js";

/** Records of all conversations, the last used first. */
export async function list() {
  return (await database.all("conversations")).sort((a, b) => b.updated - a.updated);
}

/** Records of the conversations whose title or messages contain a text. */
export async function search(text) {
  const wanted = text.trim().toLowerCase();
  const records = await list();
  if (!wanted) return records;
  const contains = (value) => (value ?? "").toLowerCase().includes(wanted);
  const messages = await database.all("messages");
  const found = new Set(messages.filter((one) => contains(one.content) || contains(one.reasoning)).map((one) => one.conversation));
  return records.filter((record) => contains(record.title) || found.has(record.id));
}

export async function load(id) {
  const record = (await database.all("conversations")).find((one) => one.id === id);
  if (!record) return null;
  const conversation = new Conversation(record, await database.all("messages", id));
  conversation.images = new Map((await database.all("images", id)).map((image) => [image.id, image]));
  return conversation;
}

/** Save the given messages and images, then the conversation's record, which names the last message of the shown branch. */
export async function save(conversation, { messages = [], images = [] } = {}) {
  if (images.length) await database.put("images", ...images);
  if (messages.length) await database.put("messages", ...messages);
  await database.put("conversations", conversation.record);
}

export async function rename(id, title) {
  const record = (await database.all("conversations")).find((one) => one.id === id);
  if (record) await database.put("conversations", { ...record, title });
}

/** Delete a conversation. Returns a function that restores it. */
export async function remove(id) {
  const conversation = await load(id);
  await database.remove(id);
  return () => save(conversation, { messages: [...conversation.messages.values()], images: [...conversation.images.values()] });
}

/** Whether conversations outlive this page. */
export const isPersistent = async () => (await database.open()) !== null;
