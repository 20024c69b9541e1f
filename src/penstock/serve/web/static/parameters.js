// Sampling parameters: their names in requests, ranges, and meaning.

import { make } from "./dom.js";

const PARAMETERS = [
  ["temperature", 0, 100, 0.1, "Randomness: 0 always takes the likeliest token, 1 is the model's own distribution."],
  ["max_tokens", 1, null, 1, "Most tokens to generate."],
  ["top_p", 0, 1, 0.05, "Sample from the likeliest tokens that together have this probability; 1 is all."],
  ["top_k", -1, null, 1, "Sample from this many of the likeliest tokens; 0 is all."],
  ["min_p", 0, 1, 0.01, "Leave out tokens that are less likely than this share of the likeliest one's probability."],
  ["seed", -1, null, 1, "The same seed gives the same answer; empty is a random one."],
  ["repetition_penalty", 0.01, null, 0.05, "Above 1: tokens that prompt or answer have are less likely."],
  ["presence_penalty", -2, 2, 0.1, "Above 0: tokens that the answer has are less likely."],
  ["frequency_penalty", -2, 2, 0.1, "Above 0: the more often the answer has a token, the less likely it is."],
  ["min_tokens", 0, null, 1, "Tokens before which the answer cannot end."],
  ["stop", null, null, null, "Texts that end the answer, with | between them."],
  ["n", 1, 128, 1, "Answers to generate for the same prompt."],
];

/** Fill an element with a field for each parameter. */
export function addParameters(parent) {
  for (const [name, min, max, step, meaning] of PARAMETERS) {
    const id = `parameter-${name}`;
    const field = make("input", { id, name, type: step === null ? "text" : "number", placeholder: "default", "aria-describedby": `${id}-about` });
    if (min !== null) field.min = min;
    if (max !== null) field.max = max;
    if (step !== null) field.step = step === 1 ? 1 : "any";
    parent.append(make("div", { className: "parameter" },
      make("label", { htmlFor: id }, name), field,
      make("span", { className: "quiet", id: `${id}-about` }, meaning)));
  }
}

/** The parameters that are given, as fields of a request. Throws an Error for a value out of range. */
export function readParameters(form) {
  const given = {};
  for (const [name, , , step] of PARAMETERS) {
    const field = form.elements[name];
    if (field.value.trim() === "" && field.validity.valid) continue;
    if (!field.validity.valid) throw new Error(`${name}: ${field.validationMessage}`);
    given[name] = step === null ? field.value.split("|").filter(Boolean) : Number(field.value);
  }
  return given;
}
