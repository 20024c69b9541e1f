// The served models and the chosen one.

import { $, make } from "../ui/dom.js";
import { store, stored } from "../ui/storage.js";
import { call } from "./client.js";

let models = new Map();

export const currentModel = () => models.get($("model").value);
export const currentName = () => $("model").value;
export const hasModel = (name) => models.has(name);

export function chooseModel(name) {
  if (!models.has(name) || $("model").value === name) return;
  $("model").value = name;
  $("model").dispatchEvent(new Event("change"));
}

/** Load the list of models. Returns their number. */
export async function loadModels() {
  const list = (await (await call("web/models")).json()).models;
  const before = $("model").value || stored("model");
  models = new Map(list.flatMap((model) => model.names.map((name) => [name, model])));
  $("model").replaceChildren(...[...models.keys()].map((name) => make("option", { value: name }, name)));
  if (models.has(before)) $("model").value = before;
  return models.size;
}

export function startModels(onChange) {
  $("model").addEventListener("change", () => {
    store("model", $("model").value);
    onChange();
  });
}
