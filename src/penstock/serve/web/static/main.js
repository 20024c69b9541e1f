// Start of the page: views, panels, theme, shortcuts, and the list of models.

import { askForKey } from "./api/key.js";
import { loadModels, startModels } from "./api/models.js";
import * as chat from "./chat/chat.js";
import { $, drawIcons } from "./ui/dom.js";
import { closeOverlay, setPanel, startPanels, togglePanel } from "./ui/panels.js";
import { startShortcuts } from "./ui/shortcuts.js";
import { startTheme } from "./ui/theme.js";
import { toastError } from "./ui/toast.js";

const RETRY = 2000;
let live = null;

/** Show the view of the address: chat, or live view, which is loaded when it is first shown. */
async function showView() {
  const isLive = location.hash === "#live";
  document.body.dataset.view = isLive ? "live" : "chat";
  $("chat").hidden = isLive;
  $("live").hidden = !isLive;
  if (isLive) $("tab-live").setAttribute("aria-current", "page");
  else $("tab-live").removeAttribute("aria-current");
  if (isLive) live ??= await import("./live/live.js");
  live?.setVisible(location.hash === "#live");
}

let failing = null;

async function refreshModels() {
  try {
    const number = await loadModels();
    failing?.();
    failing = number ? null : toastError("No model is loaded yet.", { hint: "The page continues when one is ready." });
    chat.adaptToModel();
    if (!number) setTimeout(refreshModels, RETRY);
  } catch (error) {
    failing?.();
    failing = toastError(error);
    setTimeout(refreshModels, RETRY);
  }
}

drawIcons();
startPanels();
startModels(chat.adaptToModel);
chat.startChat();
startTheme(() => live?.redraw());
// With the base element, #live would link to the root; handle the link here.
$("tab-live").addEventListener("click", (event) => {
  event.preventDefault();
  location.hash = location.hash === "#live" ? "" : "live";
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close(""));
addEventListener("hashchange", showView);
$("enter-key").addEventListener("click", async () => { if (await askForKey()) refreshModels(); });
$("show-keys").addEventListener("click", () => $("keys-dialog").showModal());
startShortcuts([
  { keys: "enter", about: "Send the message" },
  { keys: "shift+enter", about: "New line" },
  { keys: "escape", about: "Stop the answer, or close a panel", typing: true, run: () => closeOverlay() || chat.stop() },
  { keys: "/", about: "Go to the message", run: () => { $("prompt").focus(); } },
  { keys: "arrowup", about: "Edit the last message (in an empty input)", typing: true, run: (event) => event.target === $("prompt") && !$("prompt").value && chat.editLast() },
  { keys: "ctrl+shift+o", about: "New conversation", typing: true, run: () => { chat.startNew(); } },
  { keys: "ctrl+k", about: "Search conversations", typing: true, run: () => { setPanel("sidebar", true); $("search").focus(); } },
  { keys: "ctrl+b", about: "Show or hide the conversations", typing: true, run: () => togglePanel("sidebar") },
  { keys: "ctrl+,", about: "Show or hide the settings", typing: true, run: () => togglePanel("settings") },
  { keys: "?", about: "Show this list", run: () => { $("keys-dialog").showModal(); } },
]);
showView();
refreshModels();
$("prompt").focus();
