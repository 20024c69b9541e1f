// Sampling parameters: names, ranges and descriptions.

import { make } from "../ui/dom.js";

const PARAMETERS = [
  ["temperature", 0, 100, 0.1, "Randomness: 0: always the most likely token; 1: the model's distribution."],
  ["max_tokens", 1, null, 1, "Maximum number of tokens to generate."],
  ["top_p", 0, 1, 0.05, "Sample from the most likely tokens with this total probability; 1: all tokens."],
  ["top_k", -1, null, 1, "Sample from this number of most likely tokens; 0: all tokens."],
  ["min_p", 0, 1, 0.01, "Exclude tokens below this fraction of the highest probability."],
  ["seed", -1, null, 1, "The same seed gives the same answer; empty: random."],
  ["repetition_penalty", 0.01, null, 0.05, "Above 1: tokens of the prompt or answer become less likely."],
  ["presence_penalty", -2, 2, 0.1, "Above 0: tokens of the answer become less likely."],
  ["frequency_penalty", -2, 2, 0.1, "Above 0: tokens become less likely the more often the answer has them."],
  ["min_tokens", 0, null, 1, "Minimum number of tokens of the answer."],
  ["stop", null, null, null, "Texts that end the answer, separated by |."],
  ["n", 1, 128, 1, "Number of answers to generate."],
];

const COMMON = 3;

/** Add a field for each parameter: the most used ones to one element, the others to another. */
export function addParameters(common, others) {
  PARAMETERS.forEach(([name, min, max, step, description], i) => {
    const id = `parameter-${name}`;
    const field = make("input", { id, name, type: step === null ? "text" : "number", placeholder: "default", "aria-describedby": `${id}-about` });
    if (min !== null) field.min = min;
    if (max !== null) field.max = max;
    if (step !== null) field.step = step === 1 ? 1 : "any";
    (i < COMMON ? common : others).append(make("div", { className: "parameter" },
      make("label", { htmlFor: id }, name), field,
      make("span", { className: "quiet", id: `${id}-about` }, description)));
  });
}

/** Read the non-empty parameters as request fields. Throws an Error for a value out of range. */
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
