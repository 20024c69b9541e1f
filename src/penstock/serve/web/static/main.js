// Main module: the two views, the model list, the theme, and the API key.

import { askForKey, call } from "./api.js";
import { $, notify } from "./dom.js";
import * as live from "./live.js";
import * as playground from "./playground.js";

const VIEWS = ["playground", "live"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function showView() {
  const chosen = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const view of VIEWS) {
    $(view).hidden = view !== chosen;
    if (view === chosen) $(`tab-${view}`).setAttribute("aria-current", "page");
    else $(`tab-${view}`).removeAttribute("aria-current");
  }
  live.setVisible(chosen === "live");
}

function showTheme() {
  const theme = localStorage.getItem("penstock-theme") ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  live.redraw();
  return theme;
}

async function loadModels() {
  try {
    const { models } = await (await call("web/models")).json();
    playground.setModels(models);
    notify(models.length ? "" : "No model is loaded yet.");
    if (!models.length) setTimeout(loadModels, 2000);
  } catch (error) {
    notify(`The server does not answer: ${error.message}`);
    setTimeout(loadModels, 2000);
  }
}

// With the base element, #live would link to the root; handle the views' links here.
for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", (event) => { event.preventDefault(); location.hash = view; });
}
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
addEventListener("hashchange", showView);
dark.addEventListener("change", showTheme);
$("theme").addEventListener("click", () => {
  localStorage.setItem("penstock-theme", showTheme() === "dark" ? "light" : "dark");
  showTheme();
});
$("enter-key").addEventListener("click", async () => { if (await askForKey()) loadModels(); });
playground.start();
live.start();
showTheme();
showView();
loadModels();
