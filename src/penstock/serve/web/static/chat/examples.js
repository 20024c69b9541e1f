// Example prompts that suit the model.

const BUILT_IN = [
  ["A fact", "What is the capital of Canada?"],
  ["Arithmetic", "What is 348 + 127?"],
  ["A list", "Sort these numbers: 31, 7, 94, 58"],
  ["中文", "加拿大的首都是哪里？"],
];
const COMPLETION = [
  ["A story", "Once upon a time, there was a lighthouse keeper who"],
  ["Code", "def is_prime(n: int) -> bool:\n    \"\"\"Return whether n is prime.\"\"\"\n"],
  ["A list", "The planets of the solar system, from the Sun outwards:\n1. Mercury\n2."],
  ["A definition", "In computer science, a hash table is"],
];
const CHAT = [
  ["Explain", "Explain how a hash table works, with a small example in Python."],
  ["Compare", "Compare TCP and UDP in a table: reliability, ordering, overhead, typical uses."],
  ["Derive", "Derive the quadratic formula step by step."],
  ["Write", "Write a short, friendly e-mail that moves a meeting from Monday to Tuesday."],
];
const REASONING = ["Reason", "A bat and a ball cost 1.10 together. The bat costs 1.00 more than the ball. What does the ball cost?"];
const IMAGES = ["Look", "Describe this image in detail."];

/** Four examples as [label, prompt]. */
export function examplesFor(model, isChat) {
  if (model.built_in && isChat) return BUILT_IN;
  if (!isChat) return COMPLETION;
  const examples = [...CHAT];
  if (model.images) examples[0] = IMAGES;
  if (model.reasoning) examples[3] = REASONING;
  return examples;
}
