// Small helpers for elements. Text goes in as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** An element with properties (or attributes, where the name has a dash or is one of ATTRIBUTES) and children. */
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

/** A number of seconds for people. */
export const seconds = (value) => value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
export const count = (value) => Math.round(value).toLocaleString("en");
