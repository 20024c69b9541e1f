// Helpers for DOM elements. Text is always inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** Create an element with properties (attributes if the name has a dash or is "role") and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const notify = (message) => {
  $("notice").textContent = message;
  $("notice").hidden = !message;
};

/** Format a duration. */
export const seconds = (value) => value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
export const count = (value) => Math.round(value).toLocaleString("en");
