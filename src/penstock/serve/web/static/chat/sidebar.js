// The list of conversations: search, and a menu for each.

import * as history from "../store/history.js";
import { asJson, asMarkdown, download } from "../store/export.js";
import { $, iconButton, make } from "../ui/dom.js";
import { age } from "../ui/format.js";
import { toast } from "../ui/toast.js";

let actions = null, shownId = "", running = () => false;

/** `given`: {open(id), removed(id)}; `isRunning(id)`: whether an answer is being generated. */
export function startSidebar(given, isRunning) {
  actions = given;
  running = isRunning;
  $("search").addEventListener("input", drawList);
  addEventListener("focus", drawList);
  document.addEventListener("click", (event) => { if (!event.target.closest(".menu, .menu-button")) closeMenus(); });
  $("history").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const menu = event.target.closest(".menu");
    if (menu) { event.stopPropagation(); menu.parentElement.querySelector(".menu-button").focus(); closeMenus(); }
  });
  history.isPersistent().then((persistent) => {
    if (!persistent) $("history-note").textContent = "This browser refuses storage: conversations are lost when the page is closed.";
  });
}

export function showCurrent(id) {
  shownId = id;
  return drawList();
}

let drawing = 0, drawn = "";

export async function drawList() {
  const version = drawing += 1;
  const records = await history.search($("search").value);
  if (version !== drawing || $("history").querySelector(".menu")) return;
  const state = JSON.stringify([shownId, $("search").value, records.map((one) => [one.id, one.title, age(one.updated), running(one.id)])]);
  if (state === drawn) return;
  drawn = state;
  const items = [];
  let group = "";
  for (const record of records) {
    if (age(record.updated) !== group) items.push(make("li", { className: "group-name" }, group = age(record.updated)));
    items.push(item(record));
  }
  const none = $("search").value ? "No conversation contains this text." : "Conversations are kept in this browser.";
  const focused = document.activeElement?.closest("#history [data-id]") && [document.activeElement.closest("[data-id]").dataset.id, document.activeElement.className];
  $("history").replaceChildren(...items, ...(items.length ? [] : [make("li", { className: "quiet none" }, none)]));
  if (focused) $("history").querySelector(`[data-id="${focused[0]}"]`)?.getElementsByClassName(focused[1])[0]?.focus();
}

function item(record) {
  const title = record.title || "New conversation";
  const open = make("button", { type: "button", className: "title", title, onclick: () => actions.open(record.id) }, title);
  if (record.id === shownId) open.setAttribute("aria-current", "true");
  if (running(record.id)) open.append(make("span", { className: "dot", role: "img", "aria-label": "answering" }));
  const more = iconButton("more", `Actions for ${title}`, () => toggleMenu(element, more, record), { className: "menu-button" });
  more.setAttribute("aria-expanded", "false");
  const element = make("li", { className: record.id === shownId ? "item at" : "item" }, open, more);
  element.dataset.id = record.id;
  return element;
}

function closeMenus() {
  for (const menu of document.querySelectorAll(".menu")) {
    menu.parentElement.querySelector(".menu-button").setAttribute("aria-expanded", "false");
    menu.remove();
  }
}

function toggleMenu(element, button, record) {
  const wasOpen = element.querySelector(".menu");
  closeMenus();
  if (wasOpen) return;
  const entry = (name, label, run) => iconButton(name, label, () => { closeMenus(); run(); }, { compact: false, className: "plain" });
  button.setAttribute("aria-expanded", "true");
  element.append(make("div", { className: "menu" },
    entry("edit", "Rename", () => rename(record)),
    entry("download", "Export as Markdown", () => exportAs(record, "md")),
    entry("download", "Export as JSON", () => exportAs(record, "json")),
    entry("trash", "Delete", () => remove(record))));
  element.querySelector(".menu button").focus();
}

function rename(record) {
  const dialog = $("rename-dialog");
  $("rename").value = record.title;
  dialog.returnValue = "";
  dialog.addEventListener("close", async () => {
    if (dialog.returnValue !== "ok" || !$("rename").value.trim()) return;
    await history.rename(record.id, $("rename").value.trim());
    actions.renamed(record.id, $("rename").value.trim());
    drawList();
  }, { once: true });
  dialog.showModal();
  $("rename").select();
}

async function exportAs(record, format) {
  const conversation = await history.load(record.id);
  if (format === "json") download(`${conversation.title}.json`, asJson(conversation), "application/json");
  else download(`${conversation.title}.md`, asMarkdown(conversation), "text/markdown");
}

async function remove(record) {
  const restore = await history.remove(record.id);
  actions.removed(record.id);
  drawList();
  toast("The conversation was deleted.", { action: { label: "Undo", run: async () => { await restore(); drawList(); } } });
}
