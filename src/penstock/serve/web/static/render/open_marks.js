// Markdown that is still being written.

/** Close the code span or the emphasis that is open at the end, so that it does not flicker while it is written. */
export function closeOpenMarks(text) {
  if ((text.match(/^ {0,3}(```|~~~)/gm) ?? []).length % 2) return text;
  const start = text.lastIndexOf("\n\n") + 1;
  const last = text.slice(start);
  const outside = last.replace(/`[^`\n]+`/g, "");
  if (outside.includes("`")) return outside.endsWith("`") ? text.replace(/`+$/, "") : `${text}\``;
  if ((outside.match(/\*\*/g) ?? []).length % 2 === 0) return text.replace(/(?<!\*)\*$/, "");
  return /\*\*\s*$/.test(text) ? text.replace(/\*\*\s*$/, "") : `${text.trimEnd().replace(/\*$/, "")}**`;
}
