// Tokens of an answer, aligned with its text by their bytes.

const encoder = new TextEncoder();

/**
 * Group tokens into spans of whole characters: [{text, tokens}].
 *
 * A character may consist of several tokens. Tokens that are not part of the text (end of the answer, markers of reasoning)
 * are left out. Returns null if the tokens do not contain the text.
 */
export function alignTokens(text, tokens) {
  const pieces = tokens.map((token) => token.bytes ? new Uint8Array(token.bytes) : encoder.encode(token.text));
  const wanted = encoder.encode(text), all = concatenated(pieces);
  const start = lastIndexOf(all, wanted);
  if (start < 0) return null;
  const spans = [], decoder = new TextDecoder();
  let at = 0, pending = [];
  tokens.forEach((token, i) => {
    const from = Math.max(at, start), to = Math.min(at + pieces[i].length, start + wanted.length);
    at += pieces[i].length;
    if (from >= to) return;
    pending.push(token);
    const decoded = decoder.decode(all.subarray(from, to), { stream: true });
    if (!decoded) return;
    spans.push({ text: decoded, tokens: pending });
    pending = [];
  });
  return spans;
}

function concatenated(pieces) {
  const all = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}

function lastIndexOf(all, wanted) {
  for (let start = all.length - wanted.length; start >= 0; start -= 1) {
    let same = 0;
    while (same < wanted.length && all[start + same] === wanted[same]) same += 1;
    if (same === wanted.length) return start;
  }
  return -1;
}
